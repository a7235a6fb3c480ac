"""`python -m fa2_studio.book.pictures`: the first picture of README and site, and what the live pieces read."""

from pathlib import Path

from fa2_lab.tools.files import ROOT, write
from fa2_studio.book import hero, live_data


def files() -> dict[str, str]:
    """{place in figures/: content}."""
    return {"hero.svg": hero.moving(**hero.data()), "live/data.js": live_data.script()}


def main(folder: Path = ROOT / "figures") -> None:
    for name, content in files().items():
        print(write(folder / name, content))


if __name__ == "__main__":
    main()
