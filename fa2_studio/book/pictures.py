"""`python -m fa2_studio.book.pictures`: the moving climb of README and site, and the data of the interactive figures.

If Chromium is installed, it also makes the climb's last frame as PNG, which a link to the site shows.
"""

import hashlib
import shutil
import subprocess
import tempfile
from io import BytesIO
from pathlib import Path

from PIL import Image
from PIL.PngImagePlugin import PngInfo

from fa2_lab.tools.files import ROOT, write
from fa2_studio.book import climb_loop, live_data

LOOP = "climb_loop"
CHROMIUM = "--headless --no-sandbox --disable-gpu --hide-scrollbars --force-device-scale-factor=1"
LIGHT, STILL = "--blink-settings=preferredColorScheme=1", "*{animation:none!important}</style>"


def files() -> dict[str, str]:
    """Return {place in figures/: content}."""
    return {f"{LOOP}.svg": climb_loop.moving(**climb_loop.data()), "live/data.js": live_data.script()}


def last_frame(browser: str, svg: str) -> bytes:
    """Return the picture as it ends, with the drawing's fingerprint inside."""
    out, words = BytesIO(), PngInfo()
    words.add_text("drawing", fingerprint(svg))
    with tempfile.TemporaryDirectory() as folder:
        html, png = Path(folder, "frame.html"), Path(folder, "frame.png")
        drawing = svg.replace("</style>", STILL, 1)
        html.write_text(f"<!doctype html><style>body{{margin:0}}</style>{drawing}", encoding="utf-8")
        where = [f"--window-size={climb_loop.W},{climb_loop.H}", f"--screenshot={png}", html.as_uri()]
        call = [browser, *CHROMIUM.split(), LIGHT, f"--user-data-dir={folder}/profile", *where]
        subprocess.run(call, check=True, capture_output=True, timeout=120)
        image = Image.open(png).convert("RGB").quantize(128, dither=Image.Dither.NONE)
    image.save(out, "PNG", optimize=True, pnginfo=words)
    return out.getvalue()


def fingerprint(svg: str) -> str:
    """Return a mark of the drawing that a PNG was made from."""
    return hashlib.sha256(svg.encode()).hexdigest()[:16]


def main(folder: Path = ROOT / "figures") -> None:
    made = files()
    for name, content in made.items():
        print(write(folder / name, content))
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        print("no Chromium here, so the PNG of the climb stays as it is")
    else:
        print(write(folder / f"{LOOP}.png", last_frame(browser, made[f"{LOOP}.svg"])))


if __name__ == "__main__":
    main()
