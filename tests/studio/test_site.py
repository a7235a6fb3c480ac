"""The book's site: every link and anchor leads somewhere, nothing is asked of another machine, answers wait."""

import json
import re
import shutil
import subprocess
import sys
from base64 import b64decode
from functools import partial
from html import unescape
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from urllib.parse import unquote

import pytest
from PIL import Image
from test_book import read_notebook

pytest.importorskip("sphinx_book_theme", reason="not installed: pip install -e '.[site]'")

from fa2_lab.tools import command
from fa2_studio.book import blocks, site, slides
from fa2_studio.book.chapters import written

LOADED = {"src", "srcset", "data", "poster", "action"}  # attributes whose address a browser fetches by itself


class Page(HTMLParser):
    """The links, loaded files, anchors and images of a page."""

    def __init__(self, path):
        super().__init__()
        self.links, self.loads, self.anchors, self.images = [], [], {""}, []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        values = dict(attributes)
        self.anchors |= {values[name] for name in ("id", "name") if values.get(name)}
        self.loads += [values[name] for name in LOADED & values.keys()]
        if "href" in values:
            (self.loads if tag == "link" else self.links).append(values["href"])
        if tag == "img":
            self.images.append(values)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    assert command.main(["book", "--html", "--folder", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def pages(folder):
    return {path: Page(path) for path in folder.rglob("*.html") if "_static" not in path.parts}


def on_another_host(address):
    return re.match(r"([a-z][a-z0-9+.-]*:)?//", address)


def page_html(folder, number):
    (chapter,) = [c for c in written() if c.number == number]
    return (folder / f"{chapter.name}.html").read_text(encoding="utf-8")


def test_site_links_and_anchors_resolve(folder, pages):
    assert len(pages) > len(written())
    for path, page in pages.items():
        for link in page.links + page.loads:
            if on_another_host(link) or link.startswith(("data:", "mailto:")):
                continue
            file, _, anchor = unquote(link).partition("#")
            target = (path.parent / file.split("?")[0]).resolve() if file else path
            assert target.is_file() and target.is_relative_to(folder), f"{path.name} links to {link}"
            if target in pages and not file.endswith("search.html"):
                assert anchor in pages[target].anchors, f"{path.name} links to {link}"


def test_site_requests_nothing_from_other_hosts(folder, pages):
    for path, page in pages.items():
        assert not [address for address in page.loads if on_another_host(address)], path.name
    for style in folder.rglob("*.css"):
        for address in re.findall(r"(?:url\(|@import )\s*[\"']?([^\"')\s]+)", style.read_text(encoding="utf-8")):
            assert not on_another_host(address), f"{style.name}: {address}"
    for script in [*folder.rglob("*.js"), *folder.glob("*.html")]:
        text = script.read_text(encoding="utf-8")
        assert not re.search(r"""(fetch|import|importScripts|\.open)\(\s*["'](https?:)?//""", text), script.name


def test_site_link_previews_of_chapters_and_interactive_figures_have_their_own_pictures(folder, monkeypatch):
    """Other sites load the picture, so its address is whole where the site's is known."""
    with_own_picture = {c.name for c in written()} | {file.stem for file in folder.glob("figures/live/*.html")}
    for page in [*folder.glob("*.html"), *folder.glob("assignments/*.html"), *folder.glob("figures/live/*.html")]:
        text = page.read_text(encoding="utf-8")
        pictures = re.findall(r'<meta (?:content="([^"]*)" )?property="?og:image"?(?: content="([^"]*)")?', text)
        (picture,) = [page.parent / "".join(one) for one in pictures]
        assert picture.stem == (page.stem if page.stem in with_own_picture else "card"), page.name
        with Image.open(picture) as png:
            assert png.size == (1200, 630) and picture.stat().st_size < 60_000, page.name
        assert text.count("og:description") == 1, page.name
    monkeypatch.setitem(site.SETTINGS, "html_baseurl", "https://someone.github.io/fa2_lab/")
    assert 'og:image": "https://someone.github.io/fa2_lab/figures/card.png"' in site.index_page()
    assert 'og:image" content="https://someone.github.io/fa2_lab/figures/card.png"' in site.preview_tags("", "../")


def test_site_assignments_hide_solutions(folder):
    for page in (folder / "assignments").glob("*.html"):
        assert not re.search("(BEGIN|END) (SOLUTION|HIDDEN)", page.read_text(encoding="utf-8")), page.name


def test_site_figures_are_the_drawn_files_with_alt_text(pages):
    for path, page in pages.items():
        drawn = [image for image in page.images if image["src"].startswith("data:image/png")]
        assert len(drawn) <= 2, path.name  # drawn in the chapter, and not in figures/
        assert all(image.get("alt") for image in page.images), path.name


def test_site_live_figures_have_a_static_version_for_print(folder, pages):
    figures = re.findall(r'<figure class="live-piece[^>]*>.*?</figure>', "".join(page.read_text() for page in pages))
    assert figures
    for figure in figures:
        for pattern in (r'<iframe src="([^"]+)" title="[^"]{8,}"', r'<picture class="still">.*?<img src="([^"]+)"'):
            assert (folder / re.search(pattern, figure)[1].split("?")[0]).is_file()


def test_site_answers_are_folded(folder):
    for chapter in written():
        page = page_html(folder, chapter.number)
        answers = sum(c.source.count("<summary>Answer</summary>") for c in read_notebook(chapter).cells)
        assert page.count("<summary>Answer</summary>") == answers, chapter.name
        folds = re.findall(r'<p class="collapsed admonition-title">([^<]+)</p>', page)
        assert set(folds) <= {"The code", "Imports"}, chapter.name


def test_site_formulas_are_mathml(folder):
    assert page_html(folder, "03").count("<math display=") > 10
    assert "$" not in re.sub(r"<pre>.*?</pre>|<script.*?</script>", "", page_html(folder, "03"), flags=re.DOTALL)


def test_site_without_its_extra_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "myst_nb", None)
    assert command.main(["book", "--html", "--folder", str(tmp_path / "site")]) == 2
    says = "fa2-lab: book --html needs myst_nb, which is not installed: pip install -e '.[site]'\n"
    assert capsys.readouterr().err == says
    assert not (tmp_path / "site").exists()


# In a browser ---------------------------------------------------------------------------------------------------

BROWSER_OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")


class SiteServer(SimpleHTTPRequestHandler):
    """A server of the site, a list of its pages, and an address to which the browser posts what it has seen."""

    def do_GET(self):
        if self.path == "/":
            self.answer("text/html", "<!doctype html><meta charset=utf-8><body><script src=/browser.js></script>")
        elif self.path == "/browser.js":
            self.answer("text/javascript", Path(__file__).with_name("browser.js").read_text(encoding="utf-8"))
        elif self.path == "/favicon.ico":  # browsers ask for one by themselves
            self.answer("image/x-icon", "")
        elif self.path == "/list":
            self.server.asked = True
            self.answer("application/json", json.dumps(self.server.pages))
        else:
            super().do_GET()

    def do_POST(self):
        self.server.seen.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.answer("text/plain", "")

    def answer(self, kind, text):
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, form, *values):
        pass

    def log_error(self, form, *values):
        self.server.missing.append(self.path)


def test_site_pages_have_no_overflow_or_console_errors_in_a_browser(folder, pages, tmp_path):
    """Every page at 390, 768 and 1280 pixels, light and dark, with all folds open."""
    browser = next(filter(None, map(shutil.which, slides.BROWSERS)), None)
    if browser is None:
        pytest.skip("no Chromium here")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(SiteServer, directory=str(folder))) as server:
        server.seen, server.missing, server.asked = Queue(), [], False
        generated = ("genindex.html", "search.html")
        server.pages = [f"/{p.relative_to(folder)}" for p in sorted(pages) if p.name not in generated]
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        no_network = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
        log_to = ["--enable-logging=stderr", "--remote-debugging-port=0", f"--user-data-dir={tmp_path}"]
        call = [browser, *BROWSER_OPTIONS, no_network, *log_to, address]
        with open(tmp_path / "log", "w") as log, subprocess.Popen(call, stderr=log, stdout=log) as process:
            try:
                problems_of = server.seen.get(timeout=180)
            except Empty:
                assert not server.asked, "the browser did not finish"
                pytest.skip("the browser does not start here")
            finally:
                process.terminate()
        server.shutdown()
    console_errors = [
        line
        for line in (tmp_path / "log").read_text(errors="replace").splitlines()
        if "CONSOLE" in line and "[PST]: " not in line and "preload" not in line  # of the theme itself
    ]
    assert len(problems_of) == len(server.pages) > len(written())
    assert {page: found for page, found in problems_of.items() if found} == {}
    assert server.missing == [] and console_errors == []


# Slides ---------------------------------------------------------------------------------------------------------


def test_table_is_split_only_if_small_letters_do_not_make_room():
    row = "| Q | the consumer of these rows, once for each stage | the tiles of K and V may be overwritten |"
    parts = [blocks.table_to_html("\n".join([row, "| --- | --- | --- |", *[row] * rows])) for rows in (6, 20)]
    assert [len(tables) for tables in parts] == [1, 3]
    assert all(blocks.block_height(table) <= blocks.ROWS for tables in parts for table in tables)


@pytest.fixture(scope="module")
def decks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("slides")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slides, "BROWSERS", ())  # the handouts take long
        assert command.main(["book", "--slides", str(folder)]) == 0
    return sorted(folder.glob("*.html"))


MEASURE = """<script>
const measured = all.map((slide, n) => {
  go(n);
  const top = (element) => Math.round(element.getBoundingClientRect().top);
  const first = slide.querySelector("figure, div :is(p, ul, ol, pre, table)");
  return {
    kind: slide.classList[0],
    heading: slide.querySelector("h1, h2 b").textContent,
    choices: [...slide.querySelectorAll(".choice")].map(top),
    top: slide.matches(".first, .live") ? null : top(first),
    over: slide.scrollHeight - innerHeight,
  };
});
document.body.textContent = JSON.stringify(measured);
</script>"""


def test_answers_leave_the_choices_in_place_and_slides_fit_in_a_browser(decks, tmp_path):
    browser = next(filter(None, map(shutil.which, slides.BROWSERS)), None)
    if browser is None:
        pytest.skip("no Chromium here")
    for deck in decks:
        page = tmp_path / deck.name
        page.write_text(deck.read_text(encoding="utf-8") + MEASURE, encoding="utf-8")
        call = [
            browser,
            *BROWSER_OPTIONS,
            "--window-size=1280,720",
            f"--user-data-dir={tmp_path}/profile",
            "--dump-dom",
        ]
        done = subprocess.run([*call, page.as_uri()], capture_output=True, text=True, timeout=120)
        if not done.stdout:
            pytest.skip("the browser does not start here")
        shown = json.loads(unescape(re.search(r"<body[^>]*>(\[.*\])", done.stdout, re.DOTALL)[1]))
        tops = {slide["top"] for slide in shown} - {None}
        assert max(tops) - min(tops) <= 4, (deck.name, "all slides start at the same height")
        for n, slide in enumerate(shown):
            assert slide["over"] <= 0, (deck.name, n + 1, "a slide is not cut")
            if slide["kind"] == "asks" and shown[n + 1]["kind"] == "answers":
                assert slide["choices"] == shown[n + 1]["choices"], (deck.name, n + 1, "the choices stay in place")
            headings = [other["heading"] for other in shown[n : n + 3]]
            assert len(headings) < 3 or len(set(headings)) > 1, (deck.name, n + 1, "no heading is shown three times")


def test_slides_are_self_contained_and_show_every_figure(decks):
    cells = [cell.source for chapter in written() for cell in read_notebook(chapter).cells]
    right_options = re.findall(r"<summary>Answer</summary>\s*\*\*(.*?)\.?\*\*", "\n".join(cells))
    right_options = {blocks.normalize_option(blocks.markdown_to_html(right)) for right in right_options}
    for deck, chapters in zip(decks, slides.LECTURES.values(), strict=True):
        page, text = Page(deck), deck.read_text(encoding="utf-8")
        images = re.findall(r'<img( class=paper)? [^>]*svg\+xml;base64,([^"]*)', text)
        moving = [(kind, svg) for kind, data in images if "@keyframes" in (svg := b64decode(data).decode())]
        ends = [(kind, "@media print{*{animation" not in svg) for kind, svg in moving]
        assert ends in ([], [("", False), (" class=paper", True)]), "in print, a moving picture shows its end"
        assert not page.links and all(load.startswith("data:") for load in page.loads), deck.name
        sections = re.findall(r'<section class="?(\w*)[^>]*>(.*?)</section>', text, re.DOTALL)
        assert sum(kind != "answers" for kind, _ in sections) <= 45, "more than a lecture has time for"
        plain = [
            re.sub(r"(?s)<h2>.*?</h2>|<div class=.?asked.*?</div>|<ul>\s*<li class=\"choice.*?</ul>|<[^>]*>", "", html)
            for _, html in sections
        ]
        words = [re.sub(r"\W+", "", unescape(html)) for html in plain]
        heads = re.findall(r'<section class="picture"[^>]*><h2><i>(.*?)</i><b>(.*?)</b>', text)
        bare = [title for title, claim in heads if title == claim]
        assert len(bare) <= len(moving) // 2, "a picture's claim is its slide's headline, unless the picture moves"
        for n, (kind, _) in enumerate(sections):
            if kind == "asks":
                assert sections[n + 1][0] in ("asks", "answers"), (deck.name, n, "an answer is on the slide after")
                assert not re.search("choice right", sections[n][1]), "a question does not mark its answer"
                options = re.findall("<li class=choice>(.*?)</li>", sections[n][1], re.DOTALL)
                assert not options or "?" in sections[n][1], (deck.name, n, "a long question is not cut")
                if options and sections[n + 1][0] == "answers":
                    after = sections[n + 1][1]
                    answers = re.findall(r'<li class="choice( right)?">(.*?)</li>', after, re.DOTALL)
                    assert [option for _, option in answers] == options, (deck.name, n, "the options are the same")
                    marked = {blocks.normalize_option(option) for mark, option in answers if mark}
                    assert marked <= right_options, (deck.name, n, "the right option is the notebook's")
            elif kind == "answers":
                repeated = re.findall("class=[\"']?choice( right)?", sections[n][1])
                assert not repeated or repeated.count(" right") == 1, (deck.name, n, "one option is marked")
                assert not any(words[n] and words[n][:130] in earlier for earlier in words[:n]), (
                    deck.name,
                    n,
                    "not before it",
                )
        for chapter in (c for c in written() if c.number in chapters and not chapters[c.number]):
            for cell in read_notebook(chapter).cells:
                for solution in re.findall(r"<summary>A solution.*?```python\n(.*?)```", cell.source, re.DOTALL):
                    # A slide may have less of the first line
                    body = re.sub(r"(?m)^def [^()]*\([^()]*\):$", "", solution)
                    lines = [re.sub(r"\W+", "", re.sub("(  |^ *)# .*", "", line)) for line in body.splitlines()]
                    if max(lines, key=len) in "".join(words):  # unless the exercise is for the course alone
                        assert all(line in "".join(words) for line in lines), (deck.name, solution)
                shown = "".join(o.get("data", {}).get("text/html", "") for o in cell.get("outputs", []))
                assert all(alt in text for alt in re.findall(r'<img (alt="[^"]*")', shown)), (deck.name, cell.source)
