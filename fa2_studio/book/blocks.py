"""Convert Markdown and code to HTML blocks for slides, and estimate each block's height. A block is never split."""

import ast
import builtins
import re
from base64 import b64encode
from collections.abc import Callable, Iterator
from functools import cache
from html import escape
from itertools import chain
from math import ceil
from textwrap import wrap

from markdown_it import MarkdownIt
from mdit_py_plugins.dollarmath import dollarmath_plugin
from pygments import highlight
from pygments.formatters import HtmlFormatter
from pygments.lexers import PythonLexer

from fa2_studio.book.callouts import mathml
from fa2_studio.book.chapters import NOTEBOOKS

ROWS, LETTERS = 14.8, 64  # number of lines of text on a slide, and number of letters per line
FULL, WIDE = 16, 70  # the same limits for code, whose lines are closer together
# The most lines of a cell shown whole on a slide, and the most letters of a line that keeps its comment.
SHORT, NOTED = 11, 60
SCALES = (1.0, 0.84)  # sizes of the letters in a table; it has the largest with which it fits on a slide
MAX_PRINTED = 84  # longest printed line that is not wrapped; at this length, its letters are at least 24 pixels high
# Letters per line of text and of code beside a picture, and letters per table row.
COLUMN, CODE_COLUMN, OF_TABLE = 38, 34, 74
FENCE = re.compile(  # a code block, together with its output if there is any
    r"(^```python\n(?:(?!^```).)*^```\s+^```text\n.*?^```$|^```.*?^```$)", re.DOTALL | re.MULTILINE
)
MATH = re.compile(r'(<span class="math inline">(?:(?!</math>).)*</math></span>)([.,;:)]+)', re.DOTALL)
SENTENCE = re.compile(r"(?:(?<=[.?!])|(?<=[.?!]\)))\s+(?=[A-Z$`*(])")  # between two
ITEM = re.compile(r"\n(?=- |\d+\. )")
DEFINITION = ast.FunctionDef | ast.ClassDef
KNOWN_NAMES = {*dir(builtins), "np", "torch", "tl", "triton", "math", "device"}  # in every cell
SIGNATURE = re.compile(r"def \w+\([^()]*\)", re.DOTALL)
LONG_DOCSTRING = re.compile(r'^ +"""[^"]*\n[^"]*"""\n', re.MULTILINE)
STRING = re.compile(r"""([rbf]?)("(?:\\.|[^"\\])*"|'(?:\\.|[^'\\])*')""")
BREAK = re.compile(r"(?<=,) | (?<= )(?=(?:if|else|for|and|or|[-+]) )|(?<=[(\[{])(?!$)")
OPERATOR = re.compile(r"(?<= )(?=[*/@] )")  # where a line is only broken if there is no other place
COLOURS = HtmlFormatter(style="a11y-high-contrast-light", nowrap=True)
DARK_COLOURS = HtmlFormatter(style="a11y-high-contrast-dark")
FLAG = re.compile(r"((?<![^\s>])[^\s<>]*-[^\s<>]{0,20}(?![^\s<]))")  # a word of a command that has a hyphen
MARKDOWN = MarkdownIt("commonmark", {"html": True}).enable("table")
MARKDOWN.use(dollarmath_plugin, renderer=lambda tex, how: mathml(tex, "block" if how["display_mode"] else "inline"))


def markdown_to_html(text: str) -> str:
    """Convert Markdown to HTML with embedded pictures. Links become plain text, because a deck is a single file."""

    def inside(found: re.Match) -> str:
        picture = b64encode((NOTEBOOKS / found[1]).read_bytes()).decode()
        return f'src="data:image/svg+xml;base64,{picture}"'

    html = re.sub(r"</?a\b[^>]*>", "", MARKDOWN.render(text))
    html = re.sub(r"<li>☐\s*", "<li class=choice>", html)
    html = MATH.sub(r"<span class=near>\1\2</span>", html)  # keeps a comma on the same line as the formula before it
    html = re.sub(r"<code>[^<]*</code>", lambda code: FLAG.sub(r"<span class=near>\1</span>", code[0]), html)
    html = re.sub(r"<td(?=[^>]*>[^<]{1,12}</td>)", "<td class=short", html)
    html = re.sub(r"<p><strong>(Predict|Build)\.</strong>", r"<p><b class=task>\1</b>", html)
    return re.sub(r'src="(\.\./figures/[^"]+\.svg)"', inside, html)


def text_to_html_blocks(text: str) -> tuple[str, ...]:
    """Return all blocks of a Markdown text as HTML."""
    return tuple(piece for part in split_markdown(text) for piece in block_to_html(part))


def split_markdown(text: str) -> list[str]:
    """Split Markdown at empty lines into its paragraphs, lists, tables and listings."""
    parts = [[part] if part.startswith("```") else re.split(r"\n\s*\n", part) for part in FENCE.split(text)]
    return [part.strip() for some in parts for part in some if part.strip()]


def block_to_html(part: str) -> list[str]:
    """Convert a Markdown block to HTML. A listing, table or list that is taller than a slide is split into pieces."""
    if part.startswith("```"):
        code, _, printed = re.sub(r"\A.*\n|\n```(?=\n|\Z)", "", part).partition("\n\n```text\n")
        return listing_to_html(shorten_cell(code, printed) if printed else code, part.startswith("```python"), printed)
    if part.startswith("|"):
        return table_to_html(part)
    if part.startswith(("- ", "1. ")):
        items = re.split(ITEM, part)
        return [
            markdown_to_html("\n".join(some))
            for some in split_by_height(items, [block_height(markdown_to_html(item)) - 0.4 for item in items], ROWS)
        ]
    return [markdown_to_html(part)]


def mark_right_option(answer: tuple[str, ...], options: str) -> tuple[str, ...]:
    """Return the options with the right one marked, followed by the answer.

    The answer begins with the right option in bold, which is removed.
    """
    first, *rest = answer
    right = re.match(r"<p><strong>(.*?)\.?</strong>\s*", first, re.DOTALL)
    texts = [normalize_option(option) for option in re.findall(r"<li class=choice>(.*?)</li>", options, re.DOTALL)]
    if not right or normalize_option(right[1]) not in texts:
        raise ValueError(f"answer: got {first[:80]!r}; it begins with one of {texts}")
    n = texts.index(normalize_option(right[1]))
    before, *parts = options.split("<li class=choice>")
    marked = before + "".join(f'<li class="choice{" right" * (k == n)}">{part}' for k, part in enumerate(parts))
    return (marked, *filter(normalize_option, [first.replace(right[0], "<p>")]), *rest)


def normalize_option(html: str) -> str:
    """Return an option's words in a form that is the same in questions and answers."""
    return re.sub(r"<[^>]*>|\s|\.$", "", html.strip()).casefold()


def table_to_html(part: str) -> list[str]:
    """Convert a table to HTML. A table that is taller than a slide becomes several tables with the same header row."""
    head, rule, *rows = part.split("\n")
    cells = [re.split(r"(?<!\\)\|", row.strip().strip("|")) for row in (head, *rows)]
    texts = [[re.sub(r"[$`*\\{}]", "", cell).strip() for cell in row] for row in cells]
    columns = [max(map(len, column)) for column in zip(*texts, strict=True)]
    widths = {scale: column_widths(texts, columns, OF_TABLE / scale - len(columns)) for scale in SCALES}
    ways = {scale: row_heights(texts, widths[scale], scale) for scale in SCALES}
    scale = next((scale for scale in SCALES if sum(ways[scale]) <= ROWS), SCALES[1])
    high = ways[scale]
    size = dict(zip(rows, high[1:], strict=True))
    parts = split_by_height(rows, high[1:], ROWS - high[0])
    tables = [
        with_size(markdown_to_html("\n".join([head, rule, *some])), high[0] + sum(map(size.get, some)), sum(columns))
        for some in parts
    ]
    return [
        fix_columns(table, widths[scale], f"fixed{' parts' * (len(tables) > 1)}") if max(high) > 1.5 * scale else table
        for table in tables
    ]


def column_widths(texts: list[list[str]], columns: list[int], most: float) -> list[int]:
    """Return the widths of a table's columns in letters, which add up to at most `most` if all words fit.

    Each column has room for its longest word and for its short cells, which are never wrapped. The rest of the width
    goes wherever it saves most lines for each letter.
    """
    whole = [[[text] if len(text) <= 12 else text.split() for text in row] for row in texts[1:]]
    least = [[max(map(len, words)) + 2 for words in row] for row in whole]
    least.append([max(int(1.2 * len(word)) + 2 for word in text.split() or [""]) for text in texts[0]])  # in bold
    widths = [max(column) for column in zip(*least, strict=True)]
    while (rest := int(most - sum(widths))) > 0:
        now, best = total_lines(texts, widths), (0.0, 0, 0)
        for n, width in enumerate(widths):
            for more in range(1, min(rest, columns[n] + 1 - width) + 1):
                saved = now - total_lines(texts, [*widths[:n], width + more, *widths[n + 1 :]])
                best = max(best, (saved / more, n, more))
        if best[0] <= 0:
            break
        widths[best[1]] += best[2]
    return widths


@cache
def lines_of_text(text: str, width: int) -> int:
    return len(wrap(text, width, break_long_words=False, break_on_hyphens=False)) or 1


def total_lines(texts: list[list[str]], widths: list[int]) -> float:
    """Return the number of lines of all rows, plus a hundredth of those of all cells, which decide between equals."""
    lines = [[lines_of_text(text, width) for text, width in zip(row, widths, strict=True)] for row in texts]
    return sum(max(row) + 0.01 * sum(row) for row in lines)


def row_heights(texts: list[list[str]], widths: list[int], scale: float) -> list[float]:
    """Return the estimated heights of a table's rows in text rows, if its letters are scaled by `scale`."""
    lines = (max(lines_of_text(text, width) for text, width in zip(row, widths, strict=True)) for row in texts)
    return [scale * (0.95 * n + 0.2) for n in lines]


def fix_columns(table: str, widths: list[int], kind: str) -> str:
    """Return a table with these widths of its columns in letters."""
    columns = "".join(f'<col style="width: {100 * width / sum(widths):.1f}%">' for width in widths)
    return re.sub("(<table[^>]*)>", rf'\1 class="{kind}"><colgroup>{columns}</colgroup>', table, count=1)


def split_by_height(
    lines: list[str], heights: list[float], most: float, cost: Callable[[str, str], float] = lambda before, line: 0
) -> list:
    """Split the lines into parts of about equal height, none of them taller than `most`.

    `cost(before, line)` is the cost of a cut between these two lines. The cuts with the lowest cost are chosen.
    """
    number = ceil(sum(heights) / most - 0.01)
    if number < 2:
        return [lines]
    fair = sum(heights) / number
    least = max(0.6 * fair, sum(heights) - (number - 1) * most)  # the rest must fit into number − 1 parts
    good = [k for k in range(1, len(lines)) if least <= sum(heights[:k]) <= most] or [1]
    at = min(good, key=lambda k: (cost(lines[k - 1], lines[k]), abs(sum(heights[:k]) - fair)))
    return [lines[:at], *split_by_height(lines[at:], heights[at:], most, cost)]


def sentence_about(names: list[str], text: str, most: int, *, last: bool) -> tuple[str, str]:
    """Return the sentence of a paragraph that contains one of these names, and the rest of the paragraph.

    If `most` allows it, the preceding sentence is included. With `last`, choose the last sentence instead, which
    announces printed output.
    """
    parts = re.split(SENTENCE, text)
    named = (n for n, part in enumerate(parts) if any(f"`{name}`" in part for name in names))
    at = len(parts) - 1 if last else next(named, 0)
    start = at - (most > 60)
    return (
        (" ".join(parts[start : at + 1]), " ".join(parts[:start] + parts[at + 1 :]))
        if at
        else first_sentences(text, most)
    )


def first_sentences(text: str, most: int) -> tuple[str, str]:
    """Return a paragraph's first sentences, with at least `most` letters in total, and the remaining sentences.

    The remaining sentences go into the notes.
    """
    first, *others = re.split(SENTENCE, text)
    while others and len(first) < most:
        first = f"{first} {others.pop(0)}"
    return first, " ".join(others)


def shorten_list(text: str) -> tuple[str, str]:
    """Split a long list into its items' first sentences, for the slide, and the other sentences, for the notes.

    Any other block is returned whole, with "" as the second part.
    """
    if not text.startswith(("- ", "1. ")) or len(text) < 400:
        return text, ""
    items = [first_sentences(item, 45) for item in re.split(ITEM, text)]
    return "\n".join(first for first, _ in items), "\n\n".join(rest for _, rest in items if rest)


def print_statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield the statements that only print."""
    for node in body:
        inside = list(print_statements(node.body)) if isinstance(node, ast.For | ast.With) else []
        if inside and len(inside) < len(node.body):
            yield from inside
        elif inside or (isinstance(node, ast.Expr) and ast.unparse(node).startswith("print(")):
            yield node


def is_self_contained(code: ast.Module) -> bool:
    """Return True if a cell uses no names from other cells, so that it can be understood on its own slide."""
    nodes = list(ast.walk(code))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    own = {node.id for node in names if isinstance(node.ctx, ast.Store)} | KNOWN_NAMES
    own |= {node.arg for node in nodes if isinstance(node, ast.arg)}
    return own.issuperset({x.id for x in names} - {x.name for x in code.body if isinstance(x, DEFINITION)})


def shorten_cell(code: str, printed: str = "") -> str:
    """Shorten a cell for a slide: omit calls and prints, and show a long function only from its loop on."""
    lines, tree = code.split("\n"), ast.parse(code)
    defined = [node for node in tree.body if isinstance(node, DEFINITION)]
    out = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    out += print_statements(tree.body) if printed else []
    gone = {n for node in out for n in range(node.lineno, node.end_lineno + 1)}
    if len(lines) - len(gone) + printed.count("\n") > SHORT or not is_self_contained(tree) or not (printed or defined):
        kept = {n for x in defined for n in range(x.lineno - len(x.decorator_list), x.end_lineno + 1)}
        gone = {n for n in range(1, len(lines) + 1) if n not in kept and lines[n - 1].strip()}
    for node in defined if len(lines) - len(gone) > SHORT + 2 else []:
        loop = next((x for x in reversed(node.body) if isinstance(x, ast.For)), node.body[0])
        gone |= set(range(node.body[0].lineno, loop.lineno))
        if loop is not node.body[0]:
            lines[loop.lineno - 1] = " " * loop.col_offset + "…\n" + lines[loop.lineno - 1]
    return "\n".join(line for n, line in enumerate(lines, start=1) if n not in gone).strip("\n")


def shorten_signature(signature: re.Match) -> str:
    """Return a signature, with its annotations removed if it is long."""
    line = re.sub(r"(?<=\() |, (?=\))", "", re.sub(r"\s+", " ", signature[0]))
    return re.sub(r": [^,)=]+", "", line) if len(line) > NOTED else signature[0]


def listing_to_html(code: str, python: bool = True, printed: str = "") -> list[str]:
    """Convert a listing and its output to HTML pieces of at most FULL lines.

    Long lines lose their comments, and docstrings of several lines are left out.
    """
    code = LONG_DOCSTRING.sub("", SIGNATURE.sub(shorten_signature, code)) if python else code
    lines = re.sub(r"\n\n\n+", "\n\n", code.rstrip()).split("\n")
    tall = len(lines) > FULL
    kept = [re.sub(r"\s+# .*", "", line) if tall or len(line) > NOTED else line for line in lines]
    kept = [line for line, whole in zip(kept, lines, strict=True) if line.strip("+- ") or not whole.strip("+- ")]
    for n in reversed(range(len(kept) - 1 if python else 0)):  # a line that has to be wrapped is wrapped as a whole
        if len(kept[n]) > WIDE and open_brackets(kept[n : n + 1]) > 0:
            kept[n : n + 2] = [f"{kept[n]}{' ' * kept[n].endswith(',')}{kept[n + 1].lstrip()}"]
    ways = (
        wrap_code(line, open_brackets(kept[:n])) if python else wrap_words(line, MAX_PRINTED)
        for n, line in enumerate(kept)
    )
    short = list(chain(*ways))
    output = (
        list(chain(*(wrap_words(line, MAX_PRINTED) for line in narrow_columns(printed).split("\n")))) if printed else []
    )
    pieces = [pre_html(part, python) for part in split_by_height(short, [1.0] * len(short), FULL, cut_cost) if code]
    return pieces + [
        pre_html(part, python=False, kind=" class=printed")
        for part in split_by_height(output, [1.0] * len(output), FULL)
        if part
    ]


def indentation(line: str) -> int:
    return len(line) - len(line.lstrip())


def cut_cost(before: str, line: str) -> int:
    """Return the cost of splitting a listing between two lines. It is lowest where the indentation is small."""
    return indentation(line) + 99 * (line.lstrip().startswith((")", "]", "}")) or before.lstrip().startswith("@"))


def open_brackets(lines: list[str]) -> int:
    """Return the number of brackets still open at the end of these lines of Python."""
    bare = STRING.sub("", "\n".join(lines))
    return sum(bare.count(bracket) for bracket in "([{") - sum(bare.count(bracket) for bracket in ")]}")


def narrow_columns(printed: str) -> str:
    """Reduce the space between the columns of a printed table to at most two characters."""
    printed = printed.rstrip()
    lines = [line.ljust(max(map(len, printed.split("\n")))) for line in printed.split("\n")]
    columns = ["".join(column) for column in zip(*lines, strict=True)]
    kept = [n for n, column in enumerate(columns) if n < 2 or "".join(columns[n - 2 : n + 1]).strip()]
    return "\n".join("".join(line[n] for n in kept).rstrip() for line in lines)


def wrap_words(line: str, most: int = WIDE) -> list[str]:
    """Wrap a line that is not Python at spaces, into lines of at most `most` letters."""
    after = " " * (indentation(line) + 4 * (most > WIDE))
    return wrap(line, most, subsequent_indent=after, break_on_hyphens=False, break_long_words=False) or [""]


def wrap_code(line: str, depth: int = 0) -> list[str]:
    """Wrap a line of Python into lines of at most WIDE letters, breaking it where the fewest brackets are open.

    `depth` is the number of brackets left open by the preceding lines.
    """
    if len(line) <= WIDE:
        return [line]
    if line.lstrip().startswith(('"""', "#")):
        return wrap_words(line)
    bare = STRING.sub(lambda string: "x" * len(string[0]), line)
    open_ = [depth + open_brackets([bare[:k]]) for k in range(WIDE)]
    least = max(indentation(line) + 8, WIDE // 3)
    ways = ((x.start() for x in re.finditer(way, bare) if least < x.start() < WIDE - 1) for way in (BREAK, OPERATOR))
    places = next(filter(None, ([(open_[at], -at) for at in way] for way in ways)), [])
    if places:
        at = -min(places)[1]
        after = " " * (indentation(line) + (8 if line.endswith(":") and not depth else 4 * (depth in (0, open_[at]))))
        return [line[:at] + " \\" * (not open_[at]), *wrap_code(after + line[at:].lstrip(), max(open_[at], 1))]
    return wrap_words(line)


def pre_html(lines: list[str], python: bool, kind: str = "") -> str:
    text = "\n".join(lines).strip("\n")
    lines = text.split("\n")
    coloured = highlight(text, PythonLexer(stripnl=False), COLOURS).removesuffix("\n") if python else escape(text)
    letters = max(map(len, lines))
    return with_size(f"<pre{kind}>{coloured}</pre>", 0.86 * len(lines) * WIDE / max(letters, WIDE) + 0.8, letters)


def with_size(block: str, rows: float, letters: int) -> str:
    """Add the height in text rows and the width in letters to the first tag of a listing or a table."""
    return re.sub(r"(?<=^<pre)|(?<=^<table)", f" data-rows={rows:.1f} data-letters={letters}", block, count=1)


def size_of(block: str) -> tuple[float, int] | None:
    """Return the height in text rows and the width in letters of a listing or a table, or None for other blocks."""
    found = re.match(r"<\w+ data-rows=([\d.]+) data-letters=(\d+)", block)
    return (float(found[1]), int(found[2])) if found else None


def block_height(block: str, letters: int = LETTERS) -> float:
    """Return the estimated height of a block in text rows of `letters` letters each."""
    if known := size_of(block):
        return known[0]
    lines = [re.sub(r"<[^>]*>\s*", "", line).strip() for line in re.split(r"</(?:p|li|tr)>", block)]
    boxes = 0.5 * block.count("class=choice") + 1.4 * block.count("<mtr")
    return sum(1.1 * -(-len(line) // letters) for line in lines) + boxes + 0.4


def is_dense(block: str) -> bool:
    """Return True if an HTML block is a table or a listing."""
    return block.startswith("<table") or is_code(block)


def is_code(block: str) -> bool:
    """Return True if an HTML block is a listing rather than printed output."""
    return block.startswith("<pre") and "class=printed" not in block


def fits_in_column(words: tuple[str, ...]) -> bool:
    """Return True if these blocks fit into half of a slide's width."""
    narrow = all(
        size_of(block)[1] <= (COLUMN if "<table" in block else CODE_COLUMN) for block in words if size_of(block)
    )
    return narrow and sum(block_height(block, COLUMN) for block in words) <= ROWS
