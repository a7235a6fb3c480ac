"""Split QUESTIONS.md into a first page that lists all questions, and one page for each group of questions."""

import re

from fa2_lab.tools import files

FILE = files.ROOT / "QUESTIONS.md"
FIRST = "questions"


def question_pages() -> dict[str, str]:
    """Return {name: Markdown} for the pages, beginning with the list of all questions."""
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
    """Return the name of a group's page, which is based on the first word of the group's title."""
    return f"{FIRST}_{heading_anchor(group.split()[0])}"


def heading_anchor(title: str) -> str:
    """Return a heading's anchor, the last part of a link to the heading on GitHub or on the site."""
    return re.sub(r"[^\w -]", "", title).lower().replace(" ", "-")


def group_page(group: str) -> str:
    """Return a group's page. Its headings move up one level, and its meta description lists the questions."""
    questions = " ".join(re.findall(r"^### (.*)", group, re.MULTILINE))
    head = f'---\nmyst:\n  html_meta:\n    "description": "{questions}"\n---\n\n'
    return head + re.sub(r"^#(?=#+ )", "", group, flags=re.MULTILINE)
