"""The Sphinx extension of the site: Predict and Takeaway as callouts, formulas as MathML."""

from __future__ import annotations

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.transforms import SphinxTransform

CALLOUTS = ("Predict", "Takeaway")


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


def inline(self, node: nodes.math) -> None:
    self.body.append(tex2mathml(node.astext()))
    raise nodes.SkipNode


def display(self, node: nodes.math_block) -> None:
    self.body.append(tex2mathml(node.astext()).replace("<math", '<math display="block"', 1))
    raise nodes.SkipNode


def setup(app) -> dict:
    app.add_transform(Callouts)
    app.add_html_math_renderer("mathml", (inline, None), (display, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
