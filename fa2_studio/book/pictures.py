"""Make the moving climb for the README and the site, and the data of the interactive figures.

Call it as `python -m fa2_studio.book.pictures`. If Chromium is installed, it also makes two files for sharing: a GIF of
the whole climb, and a PNG of the card shown in link previews. If the environment variable SITE is set, the card
contains the site's address. The README's light and dark pictures of the interactive Algorithm 1 are also renewed.
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
from fa2_lab.tools.files import ROOT, write
from fa2_studio.book import climb_loop, live_data
from fa2_studio.book.climb_loop import H, W, svg_text

LOOP, CARD = "climb_loop", "card"
CHROMIUM = "--headless --no-sandbox --disable-gpu --hide-scrollbars --force-device-scale-factor=1"
LIGHT = "--blink-settings=preferredColorScheme=1"
STILL = "*{{animation-delay:-{}s!important;animation-play-state:paused!important}}</style>"
# README's interactive figure, at the step where a row's sums shrink.
PIECE, SHRINKS = "algorithm1", "step=54&theme={}&deck"
FRAME, FIRST = 0.08, 1.4  # duration in seconds of a GIF frame, and of the result shown first

TITLE = "FlashAttention-2, line by line"
FACTS = (  # pairs of lines, the first of which is bold
    *("The same output", "from one tile at a time"),
    *("Every line of the paper", "run, and checked in float64"),
    *("{first} → {last}", "of {peer}'s speed"),
)
SQUARES = '<svg xmlns="http://www.w3.org/2000/svg" viewBox="8 4 752 470" width="752" height="470">'  # of README's hero
LOOKS = """
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
    page = "<!doctype html><style>*{margin:0}img{display:block}</style>"
    for t in times:
        still = svg.replace("</style>", STILL.format(t), 1)
        page += f'<img src="data:image/svg+xml;base64,{base64.b64encode(still.encode()).decode()}">'
    with tempfile.TemporaryDirectory() as folder:
        html, png = Path(folder, "frames.html"), Path(folder, "frames.png")
        html.write_text(page, encoding="utf-8")
        where = [f"--window-size={W},{H * len(times)}", f"--screenshot={png}", html.as_uri()]
        call = [browser, *CHROMIUM.split(), LIGHT, f"--user-data-dir={folder}/profile", *where]
        subprocess.run(call, check=True, capture_output=True, timeout=120)
        sheet = Image.open(png).convert("RGB")
    return [sheet.crop((0, k * H, W, (k + 1) * H)) for k in range(len(times))]


def preview_card() -> str:
    """Return the book's preview card as SVG: the title, the squares of README's moving picture, and three facts."""
    drawn, hero = climb_loop.climb_data(), (ROOT / "figures" / "hero.svg").read_text(encoding="utf-8")
    first, last = (f"{drawn['rungs'][k].full / drawn['peer'][1]:.0%}" for k in (0, -1))
    still = re.sub("<svg [^>]*>", SQUARES, hero, count=1).replace("</style>", "*{animation:none!important}</style>", 1)
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
    return climb_loop.Animation(0.1).svg(W, H, TITLE, " ".join(lines), LOOKS, "".join(drawing))


def still_of(browser: str, svg: str) -> bytes:
    """Return a picture without motion as PNG, whose metadata contains the fingerprint of the source SVG."""
    out, words = BytesIO(), PngInfo()
    words.add_text("drawing", fingerprint(svg))
    (image,) = render_frames(browser, svg, [0])
    image.quantize(128, dither=Image.Dither.NONE).save(out, "PNG", optimize=True, pnginfo=words)
    return out.getvalue()


def still_of_piece(browser: str, theme: str) -> bytes:
    """Return README's interactive figure as PNG, at a step that shows many of its elements."""
    out = BytesIO()
    with tempfile.TemporaryDirectory() as folder:
        html, png = Path(folder, "piece.html"), Path(folder, "piece.png")
        html.write_text(live.page(PIECE, SHRINKS.format(theme)), encoding="utf-8")
        looks = [
            "--force-device-scale-factor=2",
            "--window-size=980,440",
            "--virtual-time-budget=5000",
            "--force-prefers-reduced-motion",
        ]
        call = [browser, *CHROMIUM.split(), *looks, f"--user-data-dir={folder}/profile", f"--screenshot={png}"]
        subprocess.run([*call, html.as_uri()], check=True, capture_output=True, timeout=120)
        Image.open(png).convert("RGB").quantize(64, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    return out.getvalue()


def animated_gif(browser: str, svg: str) -> bytes:
    """Return the whole loop as a GIF at two thirds of its size. Pillow merges equal frames into a longer one.

    The GIF begins with the result, because previews show the first frame.
    """
    whole = climb_loop.loop_seconds()
    times = [(whole - FIRST + k * FRAME) % whole for k in range(int(whole / FRAME))]
    shown = [image for k in range(0, len(times), 12) for image in render_frames(browser, svg, times[k : k + 12])]
    small = [image.resize((W * 2 // 3, H * 2 // 3)) for image in shown]
    for k in range(1, len(small)):
        small[k] = small[k - 1] if are_alike(small[k - 1], small[k]) else small[k]
    palette, out = small[0].quantize(64), BytesIO()
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
        print("no Chromium here, so the climb's GIF and card stay as they are")
    else:
        print(write(folder / f"{CARD}.png", still_of(browser, preview_card())))
        for theme in ("light", "dark"):
            print(write(folder / f"{PIECE}_{theme}.png", still_of_piece(browser, theme)))
        print(write(folder / f"{LOOP}.gif", animated_gif(browser, made[f"{LOOP}.svg"])))


if __name__ == "__main__":
    main()
