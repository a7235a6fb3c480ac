"""An explorer for notebooks: sliders for the sizes, the mask, the loop order and the time, and one picture."""

from __future__ import annotations

from base64 import b64encode
from functools import lru_cache
from io import BytesIO

import numpy as np

from fa2_lab.plots import explorer
from fa2_lab.plots.show import show
from fa2_lab.reference import fa1, fa2
from fa2_lab.tiles import Mask, Tiling
from fa2_lab.trace import Event, Trace

D = 4  # the head dimension; any would show the same
MISSING = "The sliders need ipywidgets: `pip install ipywidgets`, then restart the kernel. Without it, one moment:"
SLIDERS = dict(N_q=(4, 24), N_k=(4, 24), B_r=(2, 12), B_c=(2, 12))  # smallest and largest


@lru_cache(maxsize=64)
def recording(order: str, N_q: int, N_k: int, B_r: int, B_c: int, causal: bool) -> tuple[Event, ...]:
    """Every load and store of the forward of one head, as the meter saw them."""
    rng = np.random.default_rng(0)
    Q, K, V = (rng.standard_normal((n, D)) for n in (N_q, N_k, N_k))
    trace = Trace()
    stage = {"FA1": fa1, "FA2": fa2}[order]
    stage.forward(Q, K, V, B_r=B_r, B_c=B_c, mask=Mask(causal=causal), trace=trace)
    return tuple(trace.events)


def moment_data(order="FA2", N_q=12, N_k=12, B_r=4, B_c=3, causal=True, t: int | None = None) -> dict:
    """What plots.explorer.moment draws: the state after t loads and stores, or halfway if t is None."""
    tiling, events = Tiling(N_q, N_k, B_r, B_c, Mask(causal=causal)), recording(order, N_q, N_k, B_r, B_c, causal)
    return dict(name=order, tiling=tiling, d=D, events=events, t=len(events) // 2 if t is None else t)


def explore(**settings):
    """The explorer as a widget; settings as for moment_data. Its sliders stand under their names in `.controls`."""
    data = moment_data(**settings)
    try:
        import ipywidgets
    except ImportError:
        print(MISSING)
        return show(explorer.moment(**data))
    return with_sliders(ipywidgets, data)


def with_sliders(widgets, data: dict):
    """Controls that begin at this moment, and the picture that follows them."""
    controls, picture = new_controls(widgets, data), widgets.HTML()

    def redraw(_=None):
        now = moment_data(**{name: control.value for name, control in controls.items()})
        picture.value = image(explorer.moment(**now))

    def restart(_):
        """Other sizes make another number of events: the time goes to the same share of them."""
        share, sizes = controls["t"].value / controls["t"].max, {n: c.value for n, c in controls.items() if n != "t"}
        controls["t"].unobserve(redraw, "value")
        controls["t"].max = player.max = len(recording(**sizes))
        controls["t"].value = round(share * controls["t"].max)
        controls["t"].observe(redraw, "value")
        redraw()

    for name, control in controls.items():
        control.observe(redraw if name == "t" else restart, "value")
    player = widgets.Play(min=0, max=controls["t"].max, value=controls["t"].value, interval=500)
    widgets.link((player, "value"), (controls["t"], "value"))
    redraw()
    rows = [["N_q", "N_k"], ["B_r", "B_c"], ["order", "causal"]]
    lines = [widgets.HBox([controls[name] for name in row]) for row in rows]
    box = widgets.VBox([*lines, widgets.HBox([player, controls["t"]]), picture])
    box.controls, box.picture = controls, picture
    return box


def new_controls(widgets, data: dict) -> dict:
    """One control for each setting, in the order of moment_data's arguments."""
    tiling = data["tiling"]
    controls = dict(order=widgets.ToggleButtons(options=["FA1", "FA2"], value=data["name"], description="loop order"))
    for name, (low, high) in SLIDERS.items():
        value = getattr(tiling, name)
        controls[name] = widgets.IntSlider(value, min(low, value), max(high, value), description=name)
    controls["causal"] = widgets.Checkbox(tiling.mask.causal, description="causal")
    wide = widgets.Layout(width="60%")
    controls["t"] = widgets.IntSlider(data["t"], 0, len(data["events"]), description="time", layout=wide)
    return controls


def image(drawn: tuple) -> str:
    """A picture with its alternative text, as HTML."""
    figure, alt = drawn
    png = BytesIO()
    figure.savefig(png, format="png", dpi=144)
    width = round(96 * figure.get_figwidth())
    return f'<img width="{width}" alt="{alt}" src="data:image/png;base64,{b64encode(png.getvalue()).decode()}">'
