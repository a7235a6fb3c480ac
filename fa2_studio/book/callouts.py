"""The Sphinx extension of the site: Predict and Takeaway as callouts, formulas as MathML."""

import re
from xml.etree import ElementTree

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.transforms import SphinxTransform
from sphinx.transforms.post_transforms import SphinxPostTransform

CALLOUTS = ("Predict", "Takeaway")
WORD_JOINER = "\u2060"  # has no width, and a search in a browser ignores it


class Callouts(SphinxTransform):
    """A paragraph that begins with **Predict.** or **Takeaway.** becomes a callout of that name."""

    default_priority = 400

    def apply(self) -> None:
        for paragraph in list(self.document.findall(nodes.paragraph)):
            words = [node for node in paragraph if node.astext()]  # MyST begins with an empty one
            title = words[0].astext().removesuffix(".") if words and isinstance(words[0], nodes.strong) else ""
            if title in CALLOUTS:
                paragraph.remove(words[0])
                callout = nodes.admonition("", nodes.title("", title), classes=[title.lower()])
                paragraph.replace_self(callout)
                callout += paragraph


class FoldedRows(SphinxTransform):
    """The rows of the results' tables stay out of the search, where they would hide everything else."""

    default_priority = 400

    def apply(self) -> None:
        if self.env.docname in ("index", "results"):
            for table in self.document.findall(nodes.table):
                table["classes"].append("no-search")


class WholeNames(SphinxPostTransform):
    """A column of a table is never so narrow that the hyphen of FlashAttention-3 ends a line."""

    default_priority = 400

    def run(self, **_) -> None:
        for entry in self.document.findall(nodes.entry):
            for text in list(entry.findall(nodes.Text)):
                if "FlashAttention-" in text:
                    whole = text.replace("FlashAttention-", f"FlashAttention-{WORD_JOINER}")
                    text.parent.replace(text, nodes.Text(whole))


class Signs(SphinxTransform):
    """A comma goes with the formula before it: browsers would let it begin the next line."""

    default_priority = 400

    def apply(self) -> None:
        for formula in self.document.findall(nodes.math):
            line, after = formula.parent, formula.parent.index(formula) + 1
            text = line[after] if after < len(line) else None
            if isinstance(text, nodes.Text) and (sign := re.match(r"[.,:;?!)]+", text)):
                formula["sign"] = sign[0]
                line[after] = nodes.Text(text[sign.end() :])


def mathml(tex: str, display: str) -> str:
    """A formula as MathML. Indices are lowered by hand: a browser without a font for mathematics would not."""
    text = tex2mathml(tex).replace(' xmlns="http://www.w3.org/1998/Math/MathML"', "", 1)
    formula = ElementTree.fromstring(text.replace("&ApplyFunction;", "\u2061"))
    formula.set("display", display)
    for index in list(formula.iter("msub")):
        index.tag, below = "mrow", index[1]
        index[1] = ElementTree.Element("mpadded", voffset="-0.25em")
        ElementTree.SubElement(index[1], "mstyle", scriptlevel="+1").append(below)
    for function in formula.iter("mo"):
        if function.text == "\u2061":  # "log of": a narrow space, as in print
            function.tag, function.text = "mspace", None
            function.set("width", "0.17em")
    return ElementTree.tostring(formula, encoding="unicode")


def inline(self, node: nodes.math) -> None:
    sign = node.get("sign", "")
    formula = mathml(node.astext(), "inline") + sign
    self.body.append(f'<span class="whole">{formula}</span>' if sign else formula)
    raise nodes.SkipNode


def block(self, node: nodes.math_block) -> None:
    self.body.append(mathml(node.astext(), "block"))
    raise nodes.SkipNode


def setup(app) -> dict:
    app.add_transform(Callouts)
    app.add_transform(Signs)
    app.add_transform(FoldedRows)
    app.add_post_transform(WholeNames)
    app.add_html_math_renderer("mathml", inline_renderers=(inline, None), block_renderers=(block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
