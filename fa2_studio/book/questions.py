"""Split QUESTIONS.md into pages: one for each group of questions, after a first page that lists all questions."""

import re

from fa2_lab.tools import files

FILE = files.ROOT / "QUESTIONS.md"
FIRST = "questions"


def question_pages() -> dict[str, str]:
    """Return {name: Markdown} of the pages, the list first."""
    first, *groups = re.split(r"^(?=## )", FILE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = {FIRST: first} | {page_name(group[3:]): group_page(group) for group in groups}
    at = pages_of_anchors()
    return {page: re.sub(r"\]\(#(.+?)\)", lambda x: f"]({at[x[1]]}.md#{x[1]})", text) for page, text in found.items()}


def pages_of_anchors() -> dict[str, str]:
    """Return {anchor: name of the page} for all headings."""
    found, page = {}, FIRST
    for marks, title in re.findall(r"^(##+) (.*)", FILE.read_text(encoding="utf-8"), re.MULTILINE):
        page = page_name(title) if marks == "##" else page
        found[heading_anchor(title)] = page
    return found


def page_name(group: str) -> str:
    """Return the name of a group's page, by the first word of its title."""
    return f"{FIRST}_{heading_anchor(group.split()[0])}"


def heading_anchor(title: str) -> str:
    """Return the anchor of a heading, which is the end of a link to it, on GitHub and on the site."""
    return re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")


def group_page(group: str) -> str:
    """Return a group as a page: its headings are one level higher, and search engines are told its questions."""
    questions = " ".join(re.findall(r"^### (.*)", group, re.MULTILINE))
    head = f'---\nmyst:\n  html_meta:\n    "description": "{questions}"\n---\n\n'
    return head + re.sub(r"^#(?=#+ )", "", group, flags=re.MULTILINE)
