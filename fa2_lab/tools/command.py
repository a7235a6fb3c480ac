"""The `fa2-lab` command, also available as `python -m fa2_lab`. Without arguments, it runs the tour."""

import argparse
import ast
import os
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from textwrap import fill, indent

from fa2_lab import paper
from fa2_lab.glossary import GLOSSARY, Term

# Commands that have a main(argv). The commands of the studio are not listed here because they are entry points in
# pyproject.toml.
COMMANDS = {
    "doctor": ("fa2_lab.tools.doctor", "list what this machine has, which kernels run on it, and what is wrong"),
    "examine": ("fa2_lab.tools.examine", "find out which known mistake an attention function makes"),
    "figures": ("fa2_lab.tools.figures", "draw every picture into figures/"),
    "ladder": ("fa2_lab.tools.ladder", "show each change in the ladder of kernels, and what it gained"),
    "xray": ("fa2_lab.tools.xray.command", "compile a kernel for any chip, and show its registers and instructions"),
}
PACKAGE_COMMANDS = ("tour", "where", "errata", "glossary", *COMMANDS)
GROUP = "fa2_lab.commands"
INSTALL = "`pip install --no-deps -e .`"
EXTRAS = {"torch": "kernels", "triton": "kernels", "matplotlib": "plots", "transformers": "transformers"}


class Refused(Exception):
    """Raised if a request cannot be met. The message is a single sentence that tells the user what to do instead."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line. Return 0 for success, 1 for a failed check, 2 for invalid arguments, and 130 for Ctrl-C."""
    if sys.stdout is None:  # stdout was already closed when the command started
        sys.stdout = open(os.devnull, "w")
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # if the terminal cannot display τ, print ? in its place
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            if argv and argv[0] in COMMANDS:
                return run_command(lambda: import_module(COMMANDS[argv[0]][0]).main, argv[1:])
            if argv and argv[0] in studio():
                return run_command(studio()[argv[0]].load, argv[1:])
            if argv and argv[0].isalpha() and argv[0] not in PACKAGE_COMMANDS and not studio():
                raise Refused(
                    f"there is no {argv[0]!r} here; in a checkout of the repository, {INSTALL} adds bench, book, "
                    "course and others"
                )
            arguments = parser().parse_args(argv)
            return run_command(lambda: arguments.run, arguments)
        finally:
            sys.stdout.flush()
    except Refused as refusal:
        print(f"fa2-lab: {refusal}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the program that reads our output has closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def run_command(main: Callable[[], Callable], argv: list[str] | argparse.Namespace) -> int:
    """Run a command and convert a ValueError or a missing package into a Refused that explains what to do.

    `main` takes no arguments and returns the function that runs the command on `argv`.
    """
    try:
        return main()(argv) or 0
    except ValueError as refusal:
        raise Refused(refusal) from refusal
    except ModuleNotFoundError as missing:
        name = (missing.name or "").split(".")[0]
        if name in ("fa2_lab", "fa2_studio", ""):
            raise
        package = f"'fa2-lab[{EXTRAS[name]}]'" if name in EXTRAS else name
        raise Refused(f"this needs {name}, which is not installed: pip install {package}") from missing


def studio() -> dict[str, EntryPoint]:
    """Return {name: entry point} for the commands of other packages, such as fa2_studio, which is not in the wheel."""
    return {entry.name: entry for entry in entry_points(group=GROUP) if find_spec(entry.module.split(".")[0])}


def summary(entry: EntryPoint) -> str:
    """Return the first line of a command module's docstring, parsed without importing the module."""
    spec = find_spec(entry.module)
    assert spec and spec.origin  # every command's module is a file
    doc = ast.get_docstring(ast.parse(Path(spec.origin).read_text(encoding="utf-8"))) or ""
    return doc.split("\n")[0].removeprefix(f"`fa2-lab {entry.name}`: ").rstrip(".")


def parser() -> argparse.ArgumentParser:
    """Return the parser for all commands and their arguments."""
    top = argparse.ArgumentParser(prog="fa2-lab", description="FlashAttention-2, from the paper's line to the GPU.")
    top.set_defaults(run=tour)
    commands = top.add_subparsers(title="commands", metavar="command")
    commands.add_parser("tour", help="run every stage on this machine (the default)").set_defaults(run=tour)
    where = commands.add_parser("where", help="find the code of a line of a paper, as in fa2-lab where FA2.A1.L9")
    where.add_argument(
        "tag", nargs="?", help="a line (FA2.A1.L9) or an algorithm (FA2.A1); if none is given, list the algorithms"
    )
    where.add_argument("--all", action="store_true", help="print every place that computes the line")
    where.add_argument("--sass", action="store_true", help="print the machine instructions that the line becomes")
    where.add_argument("--chip", default="sm_90", help="with --sass, the chip to compile for, such as sm_80 or A100")
    where.set_defaults(run=show_where)
    errata = commands.add_parser("errata", help="run the known errors in the sources")
    errata.add_argument("id", nargs="?", help="the erratum to show in full (default: a table of all)")
    errata.set_defaults(run=show_errata)
    glossary = commands.add_parser("glossary", help="explain symbols and terms, in English and Chinese")
    glossary.add_argument("term", nargs="?", help="the term to explain (default: all)")
    glossary.set_defaults(run=show_glossary)
    others = {name: help for name, (_, help) in COMMANDS.items()}
    others |= {name: summary(entry) for name, entry in sorted(studio().items())}
    for name, help in others.items():
        commands.add_parser(name, help=help, add_help=False)
    return top


def tour(arguments: argparse.Namespace) -> int:
    from fa2_lab.tools.tour import tour

    return tour()


def show_where(arguments: argparse.Namespace) -> int:
    """Print the code that computes one line of a paper, the lines of one algorithm, or a list of all algorithms."""
    name = (arguments.tag or "").strip().upper()
    if (arguments.all or arguments.sass) and (not name or name in paper.ALGORITHMS):
        option = "--sass" if arguments.sass else "--all"
        raise Refused(f"where: got {option} and {name or 'no tag'}; it takes a line, such as FA2.A1.L9")
    if not name:
        print(
            "\n".join(f"{a.tag}  {a.title} ({a.source}), lines 1 to {len(a.lines)}" for a in paper.ALGORITHMS.values())
        )
        return 0
    place = paper.ALGORITHMS[name] if name in paper.ALGORITHMS else paper.where(name)
    text = place.full() if arguments.all and isinstance(place, paper.Whereabouts) else str(place)
    if arguments.sass:
        from fa2_lab.tools.xray.lines import sass_of

        text += "\n\n" + sass_of(name, arguments.chip)
    print(text)
    return 0


def show_errata(arguments: argparse.Namespace) -> int:
    """Check all errata and print them as a table, or check one erratum and print it in full."""
    from fa2_lab.errata import ERRATA, SOURCES, measure

    if arguments.id is None:
        verdicts = {name: measure(erratum) for name, erratum in ERRATA.items()}
        print(f"{'erratum':24}{'wrong: error':>14}{'right: error':>14}  verdict")
        for name, (wrong, right, apart) in verdicts.items():
            print(f"{name:24}{wrong:14.1e}{right:14.1e}  {'differ' if apart else 'DO NOT DIFFER'}")
        print(f"\n{len(ERRATA)} errata. To see one in full, run fa2-lab errata {next(iter(ERRATA))}")
        return 0 if all(v.told_apart for v in verdicts.values()) else 1
    if arguments.id not in ERRATA:
        raise Refused(f"errata: there is no {arguments.id!r}{close_to(arguments.id, ERRATA)}")
    erratum = ERRATA[arguments.id]
    verdict = measure(erratum)
    lines = [tag for tag, (_, line) in paper.LINES.items() if erratum.id in line.errata]
    print(erratum.id + "\n")
    for title, text in (
        ("in", erratum.source),
        *(("that is", full) for name, full in SOURCES.items() if name in erratum.source),
        ("says", erratum.claim),
        ("but", erratum.why),
        ("right", erratum.instead),
        ("met in", erratum.met),
    ):
        if text:
            print(paragraph(title, text))
    print(paragraph("run", f"wrong: error {verdict.wrong_error:.1e}; right: error {verdict.right_error:.1e}"))
    if lines:
        print(paragraph("lines", ", ".join(lines)))
    return 0 if verdict.told_apart else 1


def show_glossary(arguments: argparse.Namespace) -> int:
    """Print one term of the glossary, or all terms if no term is given."""
    if arguments.term is not None and arguments.term not in GLOSSARY:
        raise Refused(f"glossary: there is no {arguments.term!r}{close_to(arguments.term, GLOSSARY)}")
    for term in GLOSSARY.values():
        if arguments.term in (None, term.name):
            place = ", ".join(filter(None, (term.shape, term.lives)))
            print(f"{term.name}  {term.chinese}" + (f"  [{place}]" if place else ""))
            print(indent(fill(term.english, 74), "    "))
            if term.explained:
                print(f"    → {explained_in(term)}" + (f", figures/{term.picture}.svg" if term.picture else ""))
    return 0


def explained_in(term: Term) -> str:
    """Return the name of the chapter, appendix or rung that explains a term."""
    if term.explained.startswith("rung"):
        return f"{term.explained} of the ladder: fa2-lab ladder {term.explained[-2:]}"
    return f"{'chapter' if term.explained[:1].isdigit() else 'appendix'} {term.explained}"


def close_to(name: str, names: Iterable[str]) -> str:
    """Return a hint that lists the existing names similar to `name`, or an empty string if there are none."""
    lower = {n.lower(): n for n in names}
    close = [lower[n] for n in get_close_matches(name.lower(), lower, n=4, cutoff=0.4)]
    return f"; did you mean {', '.join(close)}?" if close else ""


def paragraph(title: str, text: str) -> str:
    """Return `text` wrapped to 78 columns, with `title` in a column on the left."""
    return fill(text, 78, initial_indent=f"{title:8}", subsequent_indent=" " * 8, break_on_hyphens=False)
