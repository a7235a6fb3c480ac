"""Make the moving climb for the README and the site, and the data of the interactive figures.

Call it as `python -m fa2_studio.book.pictures`. If Chromium is installed, it also makes the files for sharing: a GIF of
each moving picture and the card shown in link previews. If the environment variable SITE is set, the card contains the
site's address. The README's pictures of the interactive Algorithm 1 are also renewed.
"""

import base64
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from io import BytesIO
from pathlib import Path

from PIL import Image, ImageChops
from PIL.PngImagePlugin import PngInfo

from fa2_lab.plots import live
from fa2_lab.tools.figures import PHONE
from fa2_lab.tools.files import ROOT, write
from fa2_studio.book import climb_loop, live_data
from fa2_studio.book.cards import with_palette
from fa2_studio.book.climb_loop import H, W, svg_text

LOOP, HERO, CARD = "climb_loop", "hero", "card"
CHROMIUM = "--headless --no-sandbox --disable-gpu --hide-scrollbars"
LIGHT = "--blink-settings=preferredColorScheme=1"
SETTLED = "--virtual-time-budget=5000", "--force-prefers-reduced-motion"  # once the page's scripts have drawn it
STILL = "*{{animation-delay:-{}s!important;animation-play-state:paused!important}}</style>"
# README's picture of an interactive figure: its settings, its title, and its style on a card without the buttons.
PIECE, SHRINKS = "algorithm1", "step=54&theme={}&deck"
STEP = '<h1 class="title">One step of Algorithm 1: two rows meet a larger score</h1>'
FRAMED = """html{{background:{}}}
body{{height:100vh;padding:14px;border:1.5px solid {};border-radius:14px;overflow:hidden}}
.title{{margin:0 8px 8px}}.algorithm{{padding:4px 12px!important}}#transport,#code-side{{display:none}}"""
STACKED = """.title{font-size:18px;margin:0 0 8px}:is(header,.settings,.refused,.legend,.meter,.speed){display:none}
.algorithm{padding:0;margin:0}.say{min-height:0}"""  # on a phone
PAGES = {"light": ("#fff", "#d9dce0"), "dark": ("#0d1117", "#343b44")}  # {theme: colours of the page and of the edge}
FRAME, FIRST = 0.08, 1.4  # duration in seconds of a GIF frame, and of the result shown first
HERO_SECONDS = 16.5  # the length of README's first moving picture
LAST_TILE = 12.7  # the second at which it shows the last tile of scores, filled

TITLE = "FlashAttention-2, line by line"
FACTS = (  # pairs of lines, the first of which is bold
    *("The same output", "from one tile at a time"),
    *("Every line of the paper", "run, and checked in float64"),
    *("Forward: {first} → {last}", "of {peer}'s speed"),
)
SQUARES = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="8 4 752 470" width="752" height="470">'  # of README's hero
CSS = """
.h{font-size:62px;font-weight:700;letter-spacing:-1.5px}.q{font-size:36px;fill:var(--quiet)}
.p{font-size:34px;font-weight:700}.s{font-size:30px}.n{font-size:22px;fill:var(--quiet)}.o{font-size:28px;font-weight:700;fill:var(--ours)}
"""


def generated_files() -> dict[str, str]:
    """Return {path in figures/: content} for the moving climb and the data files."""
    data = {"live/data.js": live_data.data_script(), "live/measured.js": live_data.measured_script()}
    return {f"{LOOP}.svg": climb_loop.climb_svg(**climb_loop.climb_data())} | data


def render_frames(browser: str, svg: str, times: list[float]) -> list[Image.Image]:
    """Return the frames that a moving picture shows at these times in seconds.

    Chromium draws all frames on a single page, one below another.
    """
    w, h = map(int, re.search(r'width="(\d+)" height="(\d+)"', svg).groups())
    page = "<!doctype html><style>*{margin:0}img{display:block}</style>"
    for t in times:
        still = svg.replace("</style>", STILL.format(t), 1)
        page += f'<img src="data:image/svg+xml;base64,{base64.b64encode(still.encode()).decode()}">'
    sheet = screenshot(browser, page, (w, h * len(times)), 1, LIGHT)
    return [sheet.crop((0, k * h, w, (k + 1) * h)) for k in range(len(times))]


def screenshot(browser: str, page: str, size: tuple[int, int], scale: float, *options: str) -> Image.Image:
    """Return a picture of an HTML page in a window of this width and height, enlarged by `scale`."""
    with tempfile.TemporaryDirectory() as folder:
        html, png = Path(folder, "page.html"), Path(folder, "page.png")
        html.write_text(page, encoding="utf-8")
        window = [f"--window-size={size[0]},{size[1]}", f"--force-device-scale-factor={scale}"]
        call = [browser, *CHROMIUM.split(), *window, *options, f"--user-data-dir={folder}/profile"]
        subprocess.run([*call, f"--screenshot={png}", html.as_uri()], check=True, capture_output=True, timeout=120)
        return Image.open(png).convert("RGB")


def preview_card() -> str:
    """Return the book's preview card as SVG: the title, the squares of README's moving picture, and three facts."""
    drawn, hero = climb_loop.climb_data(), (ROOT / "figures" / "hero.svg").read_text(encoding="utf-8")
    first, last = (f"{drawn['rungs'][k].full / drawn['peer'][1]:.0%}" for k in (0, -1))
    still = re.sub("<svg [^>]*>", SQUARES, hero, count=1).replace("</style>", STILL.format(LAST_TILE), 1)
    picture = base64.b64encode(still.encode()).decode()
    lines = [line.format(first=first, last=last, peer=drawn["peer"][0]) for line in FACTS]
    facts = [svg_text(712, 226 + 40 * k + 22 * (k // 2), line, "s" if k % 2 else "p") for k, line in enumerate(lines)]
    site = os.environ.get("SITE", "").removeprefix("https://").rstrip("/") or "fa2_lab"
    drawing = [
        svg_text(40, 82, TITLE, "h"),
        svg_text(40, 134, "An interactive book, from NumPy to GPU kernels", "q"),
        f'<image x="28" y="160" width="656" height="410" href="data:image/svg+xml;base64,{picture}"/>',
        *facts,
        svg_text(40, H - 28, f"The speeds: {drawn['gpu']}, bf16, forward, N = 4,096, d = 128, no mask", "n"),
        svg_text(W - 40, H - 28, site, "o", ' text-anchor="end"'),
    ]
    return climb_loop.Animation(0.1).svg(W, H, TITLE, " ".join(lines), CSS, "".join(drawing))


def still_of(browser: str, svg: str) -> bytes:
    """Return a picture without motion as PNG, whose metadata contains the fingerprint of the source SVG."""
    out, words = BytesIO(), PngInfo()
    words.add_text("drawing", fingerprint(svg))
    (image,) = render_frames(browser, svg, [0])
    image.quantize(256, dither=Image.Dither.NONE).save(out, "PNG", optimize=True, pnginfo=words)
    return out.getvalue()


def readme_step(browser: str, theme: str, size: tuple[int, int], looks: str = "") -> bytes:
    """Return README's interactive figure as PNG, on a card and at a step that shows many of its elements."""
    page = live.page(PIECE, SHRINKS.format(theme)).replace("<body>", f"<body>{STEP}")
    page = page.replace("</head>", f"<style>{FRAMED.format(*PAGES[theme])}{looks}</style></head>")
    return with_palette(screenshot(browser, page, size, 2, *SETTLED))


def animated_gif(browser: str, svg: str, whole: float, size: float) -> bytes:
    """Return a whole loop of `whole` seconds as a GIF, scaled by `size`. Pillow merges equal frames into a longer one.

    The GIF begins with the result, because previews show the first frame.
    """
    times = [(whole - FIRST + k * FRAME) % whole for k in range(int(whole / FRAME))]
    shown = [image for k in range(0, len(times), 12) for image in render_frames(browser, svg, times[k : k + 12])]
    small = [image.resize((int(image.width * size), int(image.height * size))) for image in shown]
    for k in range(1, len(small)):
        small[k] = small[k - 1] if are_alike(small[k - 1], small[k]) else small[k]
    # This method has no colour close to white, which pillow would confuse with white.
    palette, out = small[0].quantize(64, Image.Quantize.MAXCOVERAGE), BytesIO()
    first, *others = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in small]
    first.save(out, "GIF", save_all=True, append_images=others, duration=round(1000 * FRAME), loop=0)
    return out.getvalue()


def are_alike(one: Image.Image, other: Image.Image) -> bool:
    """Return True if two frames differ only in the way Chromium smoothed an edge."""
    return max(most for _, most in ImageChops.difference(one, other).getextrema()) < 64


def fingerprint(svg: str) -> str:
    """Return a short hash of an SVG, which lets a test check that a PNG was made from it."""
    return hashlib.sha256(svg.encode()).hexdigest()[:16]


def main(folder: Path = ROOT / "figures") -> None:
    made = generated_files()
    for name, content in made.items():
        print(write(folder / name, content))
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print("no Chromium here, so the GIFs, the card and the stills stay as they are")
    else:
        print(write(folder / f"{CARD}.png", still_of(browser, preview_card())))
        for theme in PAGES:
            print(write(folder / f"{PIECE}_{theme}.png", readme_step(browser, theme, (980, 470))))
            narrow = readme_step(browser, theme, (390, 760), STACKED)
            print(write(folder / PHONE / f"{PIECE}_{theme}.png", narrow))
        hero, seconds = (folder / f"{HERO}.svg").read_text(encoding="utf-8"), climb_loop.loop_seconds()
        print(write(folder / f"{HERO}.gif", animated_gif(browser, hero, HERO_SECONDS, 1)))
        print(write(folder / f"{LOOP}.gif", animated_gif(browser, made[f"{LOOP}.svg"], seconds, 2 / 3)))


if __name__ == "__main__":
    main()
