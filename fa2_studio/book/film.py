"""What both moving pictures are made of: SVG that plays by itself, without a script.

An element as it is written is its last frame, and only keyframes take it back to the start. So whoever shows no motion
(a printer, a reader who asked for none) sees the result.
"""

FONTS = 'system-ui,-apple-system,"Segoe UI",Roboto,Helvetica,Arial,"DejaVu Sans",sans-serif'
LIGHT = "svg{--card:#fff;--edge:#d9dce0;--ink:#1f2328;--quiet:#59636e;--empty:#eff1f3;--ours:#6a3d9a}"
DARK = "svg{--card:#12161c;--edge:#343b44;--ink:#f0f3f6;--quiet:#a5adb8;--empty:#232932;--ours:#b48ce0}"
MIDDLE = ' text-anchor="middle"'
HERE = "transform:none"
SOFT = 0.1  # seconds of a fade


def n(x: float) -> str:
    """A number as short as it can be written."""
    return f"{x:.2f}".rstrip("0").rstrip(".").removeprefix("0") or "0"


def at(x: float, y: float) -> str:
    return f'transform="translate({n(x)} {n(y)})"'


def text(x: float, y: float, words: str, kind: str, more: str = "") -> str:
    return f'<text x="{n(x)}" y="{n(y)}" class="{kind}"{more}>{words}</text>'


def box(x: float, y: float, w: float, h: float, more: str = "", kind: str = "w", r: float = 3) -> str:
    place = f'x="{n(x)}" y="{n(y)}" width="{n(w)}" height="{n(h)}" rx="{r}"'
    return f'<rect {place} class="{kind}"{more}/>'


class Film:
    """Collects the keyframes of all elements that move, in a loop of so many seconds that begins at one of them."""

    def __init__(self, seconds: float, first: float) -> None:
        self.seconds, self.first, self.rules = seconds, first, list[str]()

    def play(self, name: str, stops: list[tuple], ease: str = "linear") -> str:
        """Keyframes from (seconds, what holds then, easing from then on); returns the attribute that plays them."""
        frames = ""
        for t, what, *how in stops:
            share = f"{100 * t / self.seconds:.2f}".rstrip("0").rstrip(".")
            eased = f";animation-timing-function:{how[0]}" if how else ""
            frames += f"{share}%{{{what}{eased}}}"
        self.rules.append(f"@keyframes {name}{{{frames}}}")
        return f' style="animation:{name} {self.seconds:g}s {ease} -{self.first:g}s infinite"'

    def shown(self, name: str, a: float, b: float | None = None, soft: float = SOFT) -> str:
        """Opaque from a on, until b or the end of the loop. What stays is opaque as written, what goes is not."""
        begin = [(0, "opacity:0"), (a, "opacity:0"), (a + soft, "opacity:1")] if a else [(0, "opacity:1")]
        if b is None:
            return self.play(name, [*begin, (self.seconds, "opacity:1")])
        end = [(b - soft, "opacity:1"), (b, "opacity:0"), (self.seconds, "opacity:0")]
        return ' opacity="0"' + self.play(name, [*begin, *end])

    def svg(self, w: int, h: int, title: str, words: str, looks: str, drawing: str) -> str:
        """The whole picture on a card of its own, which knows dark pages, print and readers who want no motion."""
        still = [
            f"@media {when}{{*{{animation:none!important}}}}" for when in ("print", "(prefers-reduced-motion:reduce)")
        ]
        style_sheet = "\n".join([LIGHT, f"text{{font-family:{FONTS};fill:var(--ink)}}", looks, *self.rules, *still])
        card = (
            f'width="{w - 1.5}" height="{h - 1.5}" rx="14" fill="var(--card)" stroke="var(--edge)" stroke-width="1.5"'
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" width="{w}" height="{h}" role="img" '
            f'aria-labelledby="title desc">\n<title id="title">{title}</title>\n<desc id="desc">{words}</desc>\n'
            f'<style>{style_sheet}</style>\n<rect x=".75" y=".75" {card}/>\n{drawing}\n</svg>\n'
        )
