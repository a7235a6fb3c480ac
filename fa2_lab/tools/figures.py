"""`fa2-lab figures`: draw every picture with its description into figures/ and write a page that shows all of them."""

import argparse
import os
import re
from io import BytesIO
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
from matplotlib.figure import Figure
from tqdm import tqdm

from fa2_lab.plots import poster, style
from fa2_lab.plots.show import file_and_argument, find_picture
from fa2_lab.tools import files

PICTURES = {  # {picture: chapter that shows it}
    "time_and_memory": "00_start",
    "gpu_map": "00_start",
    "gpu_levels": "00_start",
    "attention_map": "01_naive_attention",
    "rescaling": "02_online_softmax",
    "state_stream": "02_online_softmax",
    "merge_orders": "02_online_softmax",
    "hbm_traffic": "03_fa1",
    "visiting_order": "04_fa2_forward",
    "deferred_normalisation": "04_fa2_forward",
    "causal_tiles": "04_fa2_forward",
    "rooflines_forward": "04_fa2_forward",
    "backward_graph": "05_backward",
    "dq_over_time": "05_backward",
    "rooflines_backward": "05_backward",
    "waves": "06_parallelism",
    "waves_heads": "06_parallelism",
    "worker_tiles": "06_parallelism",
    "rooflines_row_blocks": "06_parallelism",
    "warp_split": "07_warps",
    "rooflines_split": "07_warps",
    "grid_addresses": "08_triton_forward",
    "ragged_edge": "08_triton_forward",
    "climb": "10_ladder",
    "prefetch": "10_ladder",
    "speedup_by_heads": "10_ladder",
    "roofline": "10_ladder",
    "ratios": "10_ladder",
    "wgmma": "12a_hopper_rungs",
    "bulk_copy": "12a_hopper_rungs",
    "overlap_timeline": "12a_hopper_rungs",
    "dynamic_scheduling": "12a_hopper_rungs",
    "rung_timeline_15": "12a_hopper_rungs",
    "rung_timeline_16": "12a_hopper_rungs",
    "rung_timeline_17": "12a_hopper_rungs",
    "rung_timeline_18": "12a_hopper_rungs",
    "rung_timeline_19": "12a_hopper_rungs",
    "rung_timeline_20": "12a_hopper_rungs",
    "rung_timeline_21": "12a_hopper_rungs",
    "rung_timeline_22": "12a_hopper_rungs",
    "rung_timeline_23": "12a_hopper_rungs",
    "pipelines_forward": "12b_hopper_kernel",
    "sm_budget": "12b_hopper_kernel",
    "mailbox": "12b_hopper_kernel",
    "pipeline_stages": "12b_hopper_kernel",
    "ping_pong": "12b_hopper_kernel",
    "backward_passes": "13_hopper_backward",
    "live_registers": "13_hopper_backward",
    "backward_order": "13_hopper_backward",
    "backward_step": "13_hopper_backward",
    "pipelines_backward": "13_hopper_backward",
    "dq_path": "13_hopper_backward",
    "backward_launches": "13_hopper_backward",
    "waves_divided": "13_hopper_backward",
    "rooflines_one_pass": "13_hopper_backward",
    "decode_shares": "14_decode",
    "decode_programs": "14_decode",
    "rooflines_decode": "14_decode",
    "zigzag": "15_rings",
    "ring_schedule": "15_rings",
    "ring_speed": "15_rings",
    "mask_intervals": "16_masks",
    "added_scores": "17_change_it",
    "window_tiles": "17_change_it",
    "tensor_memory": "17_change_it",
    "row_reduction": "A_lanes",
    "swizzle_xor": "A_lanes",
    "block_budget": "A_lanes",
    "rounding_bias": "D_numbers",
}
MOVING = {  # {animated picture: how to change it}
    "hero": "Because no command draws this picture, edit the file itself. The command derives its narrow version. For "
    "posting, there is also a [GIF](hero.gif).",
    "climb_loop": "Its code is in [book/climb_loop.py](../fa2_studio/book/climb_loop.py), which also writes it as a "
    "[GIF](climb_loop.gif).",
}
PHONE = "narrow"  # the subfolder for the phone versions of the pictures
SHEETS = {"poster_forward": "FA2.A1", "poster_backward": "FA2.A2"}


def build(folder: Path, names: list[str] | None = None) -> None:
    """Draw the named pictures, or all pictures if `names` is empty, and write the page that shows every picture."""
    if not names or "poster" in names:
        build_posters(folder)
    for name in tqdm(chosen(names), desc="figures", unit="figure", disable=None):
        picture, numbers = find_picture(name)
        figure, alt = picture.draw(**numbers)
        files.write(folder / f"{name}.svg", with_source(figure, alt))
        files.write(folder / PHONE / f"{name}.svg", with_source(*picture.draw(**numbers, narrow=True)))
    if (folder / "hero.svg").exists():
        files.write(folder / PHONE / "hero.svg", stacked((folder / "hero.svg").read_text(encoding="utf-8")))
    files.write(folder / "README.md", gallery_page(folder))


def with_source(figure: Figure, alt: str) -> bytes:
    """Return the figure as an SVG whose last line names the project, its licence and, for measurements, the GPU."""
    gpu = re.search(r"NVIDIA \w+", figure.get_label())
    return style.svg(figure, alt, "fa2_lab, CC BY 4.0" + (f", measured on an {gpu[0]}" if gpu else ""))


def stacked(hero: str) -> str:
    """Return the SVG of the README's first picture, modified for phones: the class `narrow` stacks its two halves."""
    narrow = 'class="narrow" viewBox="0 0 420 865" width="420" height="865"'
    hero = hero.replace('viewBox="0 0 840 540" width="840" height="540"', narrow)
    return re.sub("</tspan> ([^<]*)", r'</tspan><tspan x="420" dy="1.5em">\1</tspan>', hero)


def build_posters(folder: Path) -> None:
    """Draw the two posters, each as an SVG and a PDF file."""
    for name, tag in SHEETS.items():
        figure, alt = poster.draw(**poster.data(tag), site=os.environ.get("SITE", ""))
        files.write(folder / f"{name}.svg", style.svg(figure, alt))
        files.write(folder / f"{name}.pdf", pdf(figure))


def pdf(figure: Figure) -> bytes:
    """Return a figure as a PDF file with embedded fonts."""
    with matplotlib.rc_context(style.RC | {"pdf.fonttype": 42}):
        out = BytesIO()
        plain = dict.fromkeys(("CreationDate", "Creator", "Producer"))
        figure.savefig(out, format="pdf", metadata=plain | dict(Title=figure.get_label()))
    return out.getvalue()


def chosen(names: list[str] | None) -> list[str]:
    """Return the names of the pictures to draw: `names` or, if it is empty, all. Raise an error for an unknown name."""
    pictures = [*PICTURES, "poster"]
    unknown = set(names or ()) - set(pictures)
    if unknown:
        raise ValueError(f"figure: got {', '.join(sorted(unknown))}; it takes {', '.join(pictures)}")
    return [name for name in PICTURES if not names or name in names]


def caption(file: Path) -> str:
    """Return the caption stored in a picture's SVG file."""
    return ElementTree.parse(file).findtext("{http://www.w3.org/2000/svg}title", "")


def gallery_page(folder: Path) -> str:
    """Return the text for the folder's README.md: each picture, its caption, its chapter and the file that draws it."""
    parts = [
        "# The pictures\n\nTo change a picture, edit its code and not the file, because `python -m fa2_lab figures`"
        " writes the files again. `python -m fa2_studio.compiled` records what a picture needs of compiled kernels, and"
        " `python -m fa2_studio.book.pictures` writes the moving climb and the data of the interactive figures.\n"
    ]
    for name, drawn in MOVING.items():
        if (folder / f"{name}.svg").exists():
            message = caption(folder / f"{name}.svg")
            shown = f"{message}.\n\nThe picture is part of the [README](../README.md). {drawn}"
            parts.append(f"## {name.replace('_', ' ')}\n\n![{message}]({name}.svg)\n\n{shown}\n")
    for name, chapter in PICTURES.items():
        if not (folder / f"{name}.svg").exists():
            continue
        message = caption(folder / f"{name}.svg")
        alt = message.replace("[", "(").replace("]", ")")
        shown = f"The picture is part of chapter [{chapter}](../notebooks/{chapter}.ipynb)"
        file = f"{file_and_argument(name)[0]}.py"
        drawn = f"its code is in [plots/{file}](../fa2_lab/plots/{file})."
        parts.append(f"## {name.replace('_', ' ')}\n\n![{alt}]({name}.svg)\n\n{message}\n\n{shown}, and {drawn}\n")
    sheets = " and ".join(f"[{name}]({name}.pdf) ([SVG]({name}.svg))" for name in SHEETS)
    words = "shows an algorithm as a picture and line by line in words, NumPy and Triton"
    parts.append(f"## posters\n\nEach poster is a sheet of A1 that {words}. The posters are {sheets}.\n")
    return "\n".join(parts)


def main(argv: list[str]) -> int:
    """Draw the pictures that the command line names and return 0."""
    parser = argparse.ArgumentParser(prog="fa2-lab figures", description="Draw the project's pictures.")
    parser.add_argument("names", nargs="*", help="the names of the pictures to draw (default: all)")
    parser.add_argument("--folder", type=Path, help="the folder to write to (default: figures/ of the checkout)")
    arguments = parser.parse_args(argv)
    folder = arguments.folder or files.checkout("figures without --folder") / "figures"
    wanted = chosen(arguments.names)
    files.check_writable(folder / PHONE, "figures")
    build(folder, arguments.names)
    posters = len(SHEETS) if "poster" in (arguments.names or ["poster"]) else 0
    print(f"{len(wanted) + posters} figures in {folder}")
    return 0
