"""`python -m fa2_studio.book.pictures`: the moving pictures of README and site, and what the live pieces read.

With Chromium it also makes the climb's last frame as PNG, which a link to the site shows, and the climb as GIF.
"""

import base64
import hashlib
import shutil
import subprocess
import tempfile
from io import BytesIO
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from fa2_lab.tools.files import ROOT, write
from fa2_studio.book import climb_loop, hero, live_data

LOOP = "climb_loop"
SECONDS, SHARE = 0.08, 2 / 3  # of a frame of the GIF, and its size beside the drawing's


def files() -> dict[str, str]:
    """{place in figures/: content}."""
    return {
        "hero.svg": hero.moving(**hero.data()),
        f"{LOOP}.svg": climb_loop.moving(**climb_loop.data()),
        "live/data.js": live_data.script(),
    }


def frames(browser: str, svg: str, times: list[float], share: float = 1) -> list[Image.Image]:
    """A moving picture at these seconds, as pixels: Chromium shows all of them, one below the other."""
    w, h = (round(share * side) for side in (climb_loop.W, climb_loop.H))
    page = "<!doctype html><style>*{margin:0}img{display:block}</style>"
    for t in times:
        still = f"*{{animation-delay:-{t}s!important;animation-play-state:paused!important}}</style>"
        code = base64.b64encode(svg.replace("</style>", still, 1).encode()).decode()
        page += f'<img width="{w}" height="{h}" src="data:image/svg+xml;base64,{code}">'
    with tempfile.TemporaryDirectory() as folder:
        html, png = Path(folder, "frames.html"), Path(folder, "frames.png")
        html.write_text(page, encoding="utf-8")
        size = f"--window-size={w},{h * len(times)}"
        call = [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            "--force-device-scale-factor=1",
        ]
        light = "--blink-settings=preferredColorScheme=1"
        call += [light, f"--user-data-dir={folder}/profile", size, f"--screenshot={png}", html.as_uri()]
        subprocess.run(call, check=True, capture_output=True, timeout=120)
        sheet = Image.open(png).convert("RGB")
    return [sheet.crop((0, k * h, w, (k + 1) * h)) for k in range(len(times))]


def last_frame(browser: str, svg: str) -> bytes:
    """The picture as it ends, with the drawing's fingerprint inside."""
    out, words = BytesIO(), PngInfo()
    words.add_text("drawing", fingerprint(svg))
    (image,) = frames(browser, svg, [seconds() - 0.1])
    image.quantize(128, dither=Image.Dither.NONE).save(out, "PNG", optimize=True, pnginfo=words)
    return out.getvalue()


def seconds() -> float:
    """How long the loop is."""
    return climb_loop.times(climb_loop.data()["rungs"])[-1]


def fingerprint(svg: str) -> str:
    """Which drawing a PNG was made from."""
    return hashlib.sha256(svg.encode()).hexdigest()[:16]


def gif(browser: str, svg: str) -> bytes:
    """The whole loop; what stands still for a while is one long frame."""
    times = [round(k * SECONDS, 2) for k in range(int(seconds() / SECONDS))]
    shown: list[Image.Image] = []
    lengths: list[int] = []
    for k in range(0, len(times), 12):
        for image in frames(browser, svg, times[k : k + 12], SHARE):
            if shown and image.tobytes() == shown[-1].tobytes():
                lengths[-1] += round(1000 * SECONDS)
            else:
                shown.append(image)
                lengths.append(round(1000 * SECONDS))
    palette = shown[-1].quantize(64)
    shown = [image.quantize(palette=palette, dither=Image.Dither.NONE) for image in shown]
    out = BytesIO()
    shown[0].save(out, "GIF", save_all=True, append_images=shown[1:], duration=lengths, loop=0, optimize=False)
    return out.getvalue()


def main(folder: Path = ROOT / "figures") -> None:
    made = files()
    for name, content in made.items():
        print(write(folder / name, content))
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print("no Chromium here, so the PNG and the GIF of the climb stay as they are")
        return
    print(write(folder / f"{LOOP}.png", last_frame(browser, made[f"{LOOP}.svg"])))
    print(write(folder / f"{LOOP}.gif", gif(browser, made[f"{LOOP}.svg"])))


if __name__ == "__main__":
    main()
