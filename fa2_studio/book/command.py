"""`fa2-lab book`: run the book, or render it as a site."""

import argparse
from importlib.util import find_spec
from pathlib import Path

from fa2_lab.tools import files
from fa2_studio.book import colab
from fa2_studio.book.chapters import Chapter, written


def main(argv: list[str]) -> int:
    """Run the book's notebooks on this machine, or render the book, and print the results."""
    parser = argparse.ArgumentParser(
        prog="fa2-lab book", description="Run the notebooks on this machine and print a verdict for each."
    )
    parser.add_argument("chapters", nargs="*", help="names or numbers, such as 04 (default: all chapters)")
    parser.add_argument(
        "--folder", type=Path, default=Path("book"), help="the folder for the executed copies or the pages"
    )
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--html", action="store_true", help="render the committed notebooks as an offline site instead")
    what.add_argument("--slides", type=Path, metavar="DIR", help="write the lectures as decks and handouts into DIR")
    what.add_argument("--colab", type=Path, metavar="DIR", help="write copies for Colab into DIR")
    what.add_argument("--record", action="store_true", help="renew the outputs of the committed notebooks instead")
    what.add_argument("--pictures", action="store_true", help="renew only the pictures in the committed notebooks")
    what.add_argument("--blank", type=Path, metavar="DIR", help="write the chapters into DIR without executing them")
    arguments = parser.parse_args(argv)
    files.checkout("book")
    if (arguments.html or arguments.slides) and arguments.chapters:
        parser.error("--html and --slides take all chapters")
    if arguments.slides:
        check_extra("--slides")
        from fa2_studio.book import slides

        print(f"open {slides.write_decks(arguments.slides)[0]}")
        return 0
    if arguments.html:
        check_extra("--html")
        from fa2_studio.book.site import render_site

        print(f"open {render_site(arguments.folder)}")
        return 0
    if arguments.colab:
        colab.write_for_colab(arguments.colab)
        return 0
    from fa2_studio.book import run

    chapters = chosen_chapters(arguments.chapters)
    if arguments.pictures:
        print(*run.redraw_pictures(chapters), sep="\n")
        return 0
    if arguments.blank:
        run.write_blank(arguments.blank, chapters)
        print(f"open {arguments.blank / chapters[0].name}.ipynb")
        return 0
    verdicts = run.record_outputs(chapters) if arguments.record else run.run_all(arguments.folder, chapters)
    for v in verdicts:
        print(f"{v.name:22} {v.cells:3} cells  {v.seconds:6.1f} s  {v.error or 'ok'}")
    return 1 if any(v.error for v in verdicts) else 0


def check_extra(what: str) -> None:
    """Raise ValueError if the extra `site`, which rendering needs, is not installed."""
    missing = [module for module in ("sphinx", "myst_nb", "sphinx_book_theme") if find_spec(module) is None]
    if missing:
        raise ValueError(f"book {what} needs {', '.join(missing)}, which is not installed: pip install -e '.[site]'")


def chosen_chapters(names: list[str]) -> list[Chapter]:
    """Return the chapters with these names or numbers, or all chapters if none is named."""
    known = written()
    for name in names:
        if not any(name in (c.name, c.number) for c in known):
            raise ValueError(f"chapter: got {name!r}; it takes one of {', '.join(c.name for c in known)}")
    return [c for c in known if not names or c.name in names or c.number in names]
