"""The book's site: every link and anchor leads somewhere, nothing is asked of another machine, answers wait."""

import functools
import json
import re
import shutil
import subprocess
import sys
from functools import partial
from html import escape, unescape
from html.parser import HTMLParser
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from queue import Empty, Queue
from threading import Thread
from urllib.parse import unquote

import nbformat
import pytest

from fa2_lab.plots import explorer
from fa2_lab.tools import command
from fa2_studio.book import site
from fa2_studio.book.chapters import NOTEBOOKS, PARTS, written

pytest.importorskip("sphinx_book_theme", reason="not installed: pip install -e '.[site]'")

LOADS = {"src", "srcset", "data", "poster", "action"}  # attributes whose address a browser fetches by itself


class Page(HTMLParser):
    """What a page links to, loads, and can be linked at."""

    def __init__(self, path):
        super().__init__()
        self.links, self.loads, self.anchors, self.images = [], [], {""}, []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attributes):
        at = dict(attributes)
        self.anchors |= {at[name] for name in ("id", "name") if at.get(name)}
        self.loads += [at[name] for name in LOADS & at.keys()]
        if "href" in at:
            (self.loads if tag == "link" else self.links).append(at["href"])
        if tag == "img":
            self.images.append(at)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("site")
    assert command.main(["book", "--html", "--folder", str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def pages(folder):
    return {path: Page(path) for path in folder.rglob("*.html") if "_static" not in path.parts}


def outside(address):
    return re.match(r"([a-z][a-z0-9+.-]*:)?//", address)


@functools.cache
def notebook(chapter):
    return nbformat.read(NOTEBOOKS / f"{chapter.name}.ipynb", as_version=4)


def html(folder, number):
    (chapter,) = [c for c in written() if c.number == number]
    return (folder / f"{chapter.name}.html").read_text(encoding="utf-8")


def test_every_chapter_and_assignment_has_a_page_in_the_order_of_the_parts(folder):
    shown = re.findall(r'href="((?:assignments/)?\w+)\.html"', html(folder, "00"))
    assignments = [f"assignments/{p.stem}" for p in sorted((NOTEBOOKS / "assignments").glob("*.ipynb"))]
    wanted = [c.name for c in written() if c.number != "00"] + assignments
    assert [name for name in dict.fromkeys(shown) if name in wanted] == wanted
    assert {c.number for c in written()} <= set(" ".join(PARTS.values()).split())


def test_links_and_anchors_lead_somewhere(folder, pages):
    assert len(pages) > len(written())
    for path, page in pages.items():
        for link in page.links + page.loads:
            if outside(link) or link.startswith(("data:", "mailto:")):
                continue
            file, _, anchor = unquote(link).partition("#")
            target = (path.parent / file.split("?")[0]).resolve() if file else path
            assert target.is_file() and target.is_relative_to(folder), f"{path.name} links to {link}"
            if target in pages and not file.endswith("search.html"):
                assert anchor in pages[target].anchors, f"{path.name} links to {link}"


def test_nothing_is_fetched_from_another_machine(folder, pages):
    for path, page in pages.items():
        assert not [address for address in page.loads if outside(address)], path.name
    for style in folder.rglob("*.css"):
        for address in re.findall(r"(?:url\(|@import )\s*[\"']?([^\"')\s]+)", style.read_text(encoding="utf-8")):
            assert not outside(address), f"{style.name}: {address}"
    for script in [*folder.rglob("*.js"), *folder.glob("*.html")]:
        text = script.read_text(encoding="utf-8")
        assert not re.search(r"""(fetch|import|importScripts|\.open)\(\s*["'](https?:)?//""", text), script.name


def test_pictures_have_alternative_texts_and_open_at_full_size(folder, pages):
    for chapter in written():
        outputs = [output for cell in notebook(chapter).cells for output in cell.get("outputs", [])]
        drawn = [o.data["text/html"] for o in outputs if "<img" in o.get("data", {}).get("text/html", "")]
        alive = [shown for shown in drawn if "<picture>" in shown]  # what moves lies in the page itself, with its text
        texts = [unescape(re.search(r'alt="([^"]*)"', shown)[1]) for shown in drawn]
        for shown, alt in zip(drawn, texts, strict=True):
            assert shown not in alive or f"<desc>{escape(alt)}</desc>" in html(folder, chapter.number)
        page = pages[folder / f"{chapter.name}.html"]
        still = [alt for shown, alt in zip(drawn, texts, strict=True) if shown not in alive]
        explored = chapter.number == "04"  # whose explorer is alive, too
        told = [words for cell in notebook(chapter).cells for words in re.findall(r"!\[(.+?)\]\(", cell.source)]
        assert len(page.images) == len(still) - explored + len(told)
        assert {image["alt"] for image in page.images} <= {*still, *told}
        drawn = [image["src"] for image in page.images if image["alt"] not in told]
        assert [link for link in page.links if link.startswith("_images/")] == drawn


def test_a_picture_that_is_only_linked_comes_along(folder):
    for number, sheet in (("04", "poster_forward"), ("05", "poster_backward"), ("08", "poster_forward")):
        assert re.search(rf'href="figures/{sheet}\.(svg|pdf)"', html(folder, number)), number


def test_the_explorer_is_alive(folder):
    assert explorer.page() in html(folder, "04")


def test_questions_and_takeaways_are_callouts(folder):
    for chapter in written():
        source = (NOTEBOOKS / f"{chapter.name}.ipynb").read_text(encoding="utf-8")
        page = (folder / f"{chapter.name}.html").read_text(encoding="utf-8")
        for name in ("Predict", "Takeaway"):
            asked = len(re.findall(rf"\n\s*\"\*\*{name}\.\*\* ", source))
            assert page.count(f'<p class="admonition-title">{name}</p>') == asked >= 4, (chapter.name, name)


def test_answers_and_imports_are_folded_and_nothing_else(folder):
    for chapter in written():
        page = (folder / f"{chapter.name}.html").read_text(encoding="utf-8")
        cells = notebook(chapter).cells
        answers = [c for c in cells if c.metadata.get("jupyter", {}).get("outputs_hidden") and c.outputs]
        folds = re.findall(r'<p class="collapsed admonition-title">([^<]+)</p>', page)
        assert folds.count("The output") == len(answers) > 0, chapter.name
        hidden = [c for c in cells if c.metadata.get("jupyter", {}).get("source_hidden") and c not in answers]
        assert folds.count("The code") == sum(not site.is_imports(c) for c in hidden), chapter.name
        assert set(folds) <= {"The output", "The code", "Imports"}, chapter.name
        first = next(c for c in cells if c.cell_type == "code")
        assert ("Imports" in folds) == (not first.outputs), chapter.name


def test_formulas_are_mathml(folder):
    assert html(folder, "03").count("<math display=") > 10
    assert "$" not in re.sub(r"<pre>.*?</pre>|<script.*?</script>", "", html(folder, "03"), flags=re.DOTALL)


def test_a_printed_kernel_is_coloured(folder):
    outputs = re.findall(r'<div class="output stream highlight-python.*?</pre>', html(folder, "08"), flags=re.DOTALL)
    assert any('<span class="k">def</span>' in output for output in outputs)


def test_without_the_extra_one_sentence_says_what_to_install(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "myst_nb", None)
    assert command.main(["book", "--html", "--folder", str(tmp_path / "site")]) == 2
    said = capsys.readouterr().err
    assert said == "fa2-lab: book --html needs myst_nb, which is not here: pip install -e '.[site]'\n"
    assert not (tmp_path / "site").exists()


# In a browser ---------------------------------------------------------------------------------------------------

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking")


class Server(SimpleHTTPRequestHandler):
    """The site, a list of its pages, and a place where the browser leaves what it has seen."""

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


def test_in_a_browser_nothing_overflows_fades_or_complains(folder, pages, tmp_path):
    """Every page at 390 and 1280 pixels, light and dark, with all folds open."""
    browser = next(filter(None, map(shutil.which, BROWSERS)), None)
    if browser is None:
        pytest.skip("no Chromium here")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Server, directory=str(folder))) as server:
        server.seen, server.missing, server.asked = Queue(), [], False
        server.pages = [
            f"/{p.relative_to(folder)}" for p in sorted(pages) if p.name not in ("genindex.html", "search.html")
        ]
        Thread(target=server.serve_forever, daemon=True).start()
        address = f"http://127.0.0.1:{server.server_port}/"
        here_only = "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"
        call = [
            browser,
            *QUIET,
            here_only,
            f"--user-data-dir={tmp_path}",
            "--enable-logging=stderr",
            "--remote-debugging-port=0",
            address,
        ]
        with open(tmp_path / "log", "w") as log, subprocess.Popen(call, stderr=log, stdout=log) as process:
            try:
                seen = server.seen.get(timeout=180)
            except Empty:
                assert not server.asked, "the browser did not finish"
                pytest.skip("the browser does not start here")
            finally:
                process.terminate()
        server.shutdown()
    said = [
        line
        for line in (tmp_path / "log").read_text(errors="replace").splitlines()
        if "CONSOLE" in line and "[PST]: " not in line and "preload" not in line  # of the theme itself
    ]
    assert len(seen) == len(server.pages) > len(written())
    assert {page: found for page, found in seen.items() if found} == {}
    assert server.missing == [] and said == []
