"""The site's Sphinx extension, which renders Predict and Takeaway as callouts, and formulas as MathML."""

import re
from xml.etree import ElementTree

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.transforms import SphinxTransform
from sphinx.transforms.post_transforms import SphinxPostTransform

CALLOUTS = ("Predict", "Takeaway")
WORD_JOINER = "\u2060"  # invisible, and ignored by a browser's search


class Callouts(SphinxTransform):
    """Turn each paragraph that begins with **Predict.** or **Takeaway.** into a callout with that title."""

    default_priority = 400

    def apply(self) -> None:
        for paragraph in list(self.document.findall(nodes.paragraph)):
            words = [node for node in paragraph if node.astext()]  # MyST begins a paragraph with an empty node
            title = words[0].astext().removesuffix(".") if words and isinstance(words[0], nodes.strong) else ""
            if title in CALLOUTS:
                paragraph.remove(words[0])
                callout = nodes.admonition("", nodes.title("", title), classes=[title.lower()])
                paragraph.replace_self(callout)
                callout += paragraph


class FoldedRows(SphinxTransform):
    """Keep the tables of results out of the site's search, because their rows would hide all other matches."""

    default_priority = 400

    def apply(self) -> None:
        if self.env.docname in ("index", "results"):
            for table in self.document.findall(nodes.table):
                table["classes"].append("no-search")


class WholeNames(SphinxPostTransform):
    """Prevent line breaks at the hyphen of names such as FlashAttention-3 in tables, however narrow the column is."""

    default_priority = 400

    def run(self, **_) -> None:
        for entry in self.document.findall(nodes.entry):
            for text in list(entry.findall(nodes.Text)):
                if "FlashAttention-" in text:
                    whole = text.replace("FlashAttention-", f"FlashAttention-{WORD_JOINER}")
                    text.parent.replace(text, nodes.Text(whole))


class Signs(SphinxTransform):
    """Attach a comma or full stop to the preceding formula, because browsers might move it to the next line."""

    default_priority = 400

    def apply(self) -> None:
        for formula in self.document.findall(nodes.math):
            line, after = formula.parent, formula.parent.index(formula) + 1
            text = line[after] if after < len(line) else None
            if isinstance(text, nodes.Text) and (sign := re.match(r"[.,:;?!)]+", text)):
                formula["sign"] = sign[0]
                line[after] = nodes.Text(text[sign.end() :])


def mathml(tex: str, display: str) -> str:
    """Convert a formula to MathML. Subscripts are lowered explicitly for browsers that have no mathematical font."""
    text = tex2mathml(tex).replace(' xmlns="http://www.w3.org/1998/Math/MathML"', "", 1)
    formula = ElementTree.fromstring(text.replace("&ApplyFunction;", "\u2061"))
    formula.set("display", display)
    for index in list(formula.iter("msub")):
        index.tag, below = "mrow", index[1]
        index[1] = ElementTree.Element("mpadded", voffset="-0.25em")
        ElementTree.SubElement(index[1], "mstyle", scriptlevel="+1").append(below)
    for function in formula.iter("mo"):
        if function.text == "\u2061":  # as in print, a function such as log is followed by a narrow space
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
