"""An explorer for notebooks: sliders for the sizes, the mask, the loop order and the time, and one picture."""

from __future__ import annotations

from base64 import b64encode
from io import BytesIO

from fa2_lab.plots import moment
from fa2_lab.plots.show import show

MISSING = "The sliders need ipywidgets: `pip install ipywidgets`, then restart the kernel. Without it, one moment:"
SLIDERS = dict(N_q=(4, 24), N_k=(4, 24), B_r=(2, 12), B_c=(2, 12))  # smallest and largest


def explore(**settings):
    """The explorer as a widget; settings as for moment.data. Its sliders stand under their names in `.controls`."""
    data = moment.data(**settings)
    try:
        import ipywidgets
    except ImportError:
        print(MISSING)
        return show(moment.draw(**data))
    return with_sliders(ipywidgets, data)


def with_sliders(widgets, data: dict):
    """Controls that begin at this moment, and the picture that follows them."""
    controls, picture = new_controls(widgets, data), widgets.HTML()

    def redraw(_=None):
        now = moment.data(**{name: control.value for name, control in controls.items()})
        picture.value = image(moment.draw(**now))

    def restart(_):
        """Other sizes make another number of events: the time goes to the same share of them."""
        share, sizes = controls["t"].value / controls["t"].max, {n: c.value for n, c in controls.items() if n != "t"}
        controls["t"].unobserve(redraw, "value")
        controls["t"].max = player.max = len(moment.recording(**sizes))
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
    """One control for each setting, in the order of moment.data's arguments."""
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
