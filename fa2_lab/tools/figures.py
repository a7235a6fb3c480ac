"""`fa2-lab figures`: draw every picture into figures/, each with its description inside, and a page that shows all."""

from __future__ import annotations

import argparse
import hashlib
import inspect
import json
from dataclasses import dataclass, fields, is_dataclass
from enum import Enum
from importlib import import_module
from io import BytesIO
from pathlib import Path
from types import ModuleType

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from tqdm import tqdm

from fa2_lab.plots import hero, live, style
from fa2_lab.tools import files

DRAWN_BY = f"matplotlib {matplotlib.__version__}"


@dataclass(frozen=True)
class Picture:
    """One picture: fa2_lab/plots/NAME.py, its message in a sentence, and the chapter that shows it, or README."""

    name: str
    sentence: str
    chapter: str

    @property
    def file(self) -> ModuleType:
        """The module with its data() and draw()."""
        return import_module(f"fa2_lab.plots.{self.name}")

    @property
    def still(self) -> str:
        """The name of its file. A picture that moves has this one for print, and NAME.svg."""
        return f"{self.name}_still.svg" if hasattr(self.file, "moving") else f"{self.name}.svg"

    def digest(self, data: dict) -> str:
        """A fingerprint of what decides the picture: its data, its file, what that draws with, and the common style."""
        drawn_by = {getattr(x, "__module__", getattr(x, "__name__", "")) for x in vars(self.file).values()}
        names = {self.file.__name__, style.__name__} | {n for n in drawn_by if n and n.startswith("fa2_lab.plots.")}
        code = "".join(inspect.getsource(import_module(name)) for name in sorted(names))
        return hashlib.sha256((code + json.dumps(canonical(data))).encode()).hexdigest()[:16]


PICTURES = [
    Picture(
        "motion",
        "Standard attention, FA1 and FA2 on one clock: every block on its way between HBM, L2 and the chip.",
        "04_fa2_forward",
    ),
    Picture(
        "time_and_memory",
        "The same attention four ways on an H200, measured while N grows: its time and its memory beyond the inputs.",
        "00_start",
    ),
    Picture(
        "gpu_map",
        "The memories of a GPU to scale: the nearer to the arithmetic, the smaller and the faster.",
        "00_start",
    ),
    Picture(
        "ladder",
        "What each chapter changes in attention, and what becomes smaller by it; the result stays the same.",
        "README",
    ),
    Picture(
        "quadratic_memory",
        "S and P grow with the square of N and fill every GPU; everything else grows with N.",
        "01_naive_attention",
    ),
    Picture(
        "rescaling",
        "A larger maximum arrives: all old terms of l and o shrink by one factor, then the new ones are added.",
        "02_online_softmax",
    ),
    Picture(
        "three_softmaxes",
        "With the row's maximum, or a running one, subtracted, no exponential overflows.",
        "02_online_softmax",
    ),
    Picture(
        "state_stream",
        "A new maximum shrinks what l and o have summed so far; all other blocks just add.",
        "02_online_softmax",
    ),
    Picture(
        "merge_orders",
        "One operator, any order: a loop, a tree and a split end at the same o and L.",
        "02_online_softmax",
    ),
    Picture(
        "visiting_order",
        "FA1 moves O, l and m through HBM at every tile; FA2 keeps them on chip.",
        "04_fa2_forward",
    ),
    Picture(
        "deferred_normalisation",
        "One division per row instead of one per tile, and one scaling of o instead of two.",
        "04_fa2_forward",
    ),
    Picture(
        "dropout_orders",
        "Swap the loops: sequential dropout changes its mask, keyed dropout does not.",
        "03_fa1",
    ),
    Picture(
        "causal_tiles",
        "Causal: whole tiles above the diagonal are never touched, and few of the others need a mask.",
        "04_fa2_forward",
    ),
    Picture(
        "grouped_heads",
        "A group of query heads reads one K and V, and adds into one dK and dV.",
        "05_backward",
    ),
    Picture(
        "hbm_traffic",
        "HBM traffic grows as N² for standard attention, FA1 and FA2; only FlashAttention's shrinks with memory.",
        "03_fa1",
    ),
    Picture(
        "ragged_edge",
        "From a program's number to its rows, their addresses, and a masked tile where the tensor ends.",
        "08_triton_forward",
    ),
    Picture(
        "workers",
        "The paper's figure 2: forward workers own rows and never meet; backward workers own columns and meet on dQ.",
        "06_parallelism",
    ),
    Picture(
        "waves",
        "At batch 1, FA1 leaves 100 of 132 SMs idle; FA2 fills them, and launching heavy blocks first trims the tail.",
        "06_parallelism",
    ),
    Picture(
        "warp_split",
        "The paper's figure 3: split-Q adds nothing across warps and moves under half the bytes through shared memory.",
        "07_warps",
    ),
    Picture(
        "flop_costs",
        "One exponential costs as much as 128 to 256 matmul FLOPs; tweak 1 takes FP32 work out of the tile.",
        "04_fa2_forward",
    ),
    Picture(
        "block_budget",
        "Fewer block sizes fit as d grows: some need more registers than there are, some more shared memory.",
        "A_lanes",
    ),
    Picture(
        "backward_graph",
        "Backward: one of five products computes S again, which nobody kept; dQ costs atomics or two products more.",
        "05_backward",
    ),
    Picture(
        "dq_over_time",
        "Atomic adds meet in dQ, several at once; with two passes each block of dQ has one writer, and a later one.",
        "09_triton_backward",
    ),
    Picture(
        "accumulators",
        "As compiled: a row of S and of O belongs to one warp, spread over four of its lanes.",
        "A_lanes",
    ),
    Picture(
        "row_reduction",
        "A 64 × 128 accumulator by warp, lane and register: four lanes share a row, and two shuffles find its maximum.",
        "A_lanes",
    ),
    Picture(
        "swizzle_xor",
        "A swizzle bit by bit: chunk XOR row is the place, and eight reads of one group of banks become one of each.",
        "A_lanes",
    ),
    Picture(
        "swizzled_keys",
        "As compiled: the same chunk of eight rows of K lies in eight different groups of shared-memory banks.",
        "A_lanes",
    ),
    Picture(
        "climb",
        "The ladder as measured on an H200: the speed of its rungs, one change a rung, beside its peer.",
        "10_ladder",
    ),
    Picture(
        "roofline",
        "The ladder under the roofline of an H200: from rung 03 on, DRAM is no longer the limit.",
        "10_ladder",
    ),
    Picture(
        "speed",
        "Speed over the sequence length on an H200, beside the peers of the same run, forward and backward.",
        "10_ladder",
    ),
    Picture(
        "wgmma",
        "The two products of a tile on Hopper: which factor lies in shared memory, and what stays in registers.",
        "12_hopper_forward",
    ),
    Picture(
        "bulk_copy",
        "A tile on its way by the copy engine: one thread, a descriptor, zeros past the end, and a barrier.",
        "12_hopper_forward",
    ),
    Picture(
        "pipes",
        "Who waits for whom in the Hopper forward: a producer warp, rings of buffers, consumer warpgroups, turns.",
        "12_hopper_forward",
    ),
    Picture(
        "timeline",
        "Copies, tensor cores and exponentials over time: what overlaps within a warpgroup and between two.",
        "12_hopper_forward",
    ),
    Picture(
        "tickets",
        "Causal row blocks dealt to SMs in advance leave some of them idle; drawn as tickets they do not.",
        "12_hopper_forward",
    ),
    Picture(
        "forward_ideas",
        "The ideas that change most in the Hopper forward on an H200, what did not help included.",
        "12_hopper_forward",
    ),
    Picture(
        "backward_pipes",
        "Who waits for whom in the Hopper backward: two consumers meet at dS, and the copy engine adds dQ.",
        "13_hopper_backward",
    ),
    Picture(
        "backward_step",
        "A step of the Hopper backward over time: its dQ is multiplied in the next step, beside the exponentials.",
        "13_hopper_backward",
    ),
    Picture(
        "shares",
        "Decode gives every program an equal share of all tiles; heads that several have read are merged.",
        "14_decode",
    ),
    Picture(
        "programs",
        "One query over 65,536 keys on an H200: time over the number of programs that share the cache.",
        "14_decode",
    ),
    Picture(
        "ends",
        "256 programs of decode read a head each, on an H200: when each of them ends, over its SM.",
        "14_decode",
    ),
    Picture(
        "ring_schedule",
        "Ring attention on four ranks: whose keys are where at each step, and what travels while a rank computes.",
        "15_rings",
    ),
    Picture(
        "zigzag",
        "Contiguous shards leave causal work uneven among ranks; a front and a back piece each make it even.",
        "15_rings",
    ),
    Picture(
        "ring_speed",
        "The ring measured on 2 and 4 H200s: speed over one GPU by sequence length, and peak memory of each GPU.",
        "15_rings",
    ),
    Picture(
        "intervals",
        "Causal masks, windows, padding, packed documents, sinks: each row sees one interval, which decides its tiles.",
        "16_masks",
    ),
]

POSTER = Picture(
    "poster", "An algorithm on a sheet of A3, each line in words, NumPy, Triton and work.", "04_fa2_forward"
)
SHEETS = {"poster_forward": "FA2.A1", "poster_backward": "FA2.A2"}
HERO = "hero"  # which plays by itself, and has a still for print
LIVE = "live"  # what the live pieces read


def build(folder: Path, names: list[str] | None = None) -> None:
    """Draw the named pictures (all, if none is named) and write the page that shows all of them."""
    if not names or POSTER.name in names:
        build_posters(folder)
    if not names or HERO in names:
        for name, svg in hero.files().items():
            files.write(folder / name, svg)
    if not names or LIVE in names:
        (folder / LIVE).mkdir(exist_ok=True)
        for name, content in live.files().items():
            files.write(folder / LIVE / name, content)
    for picture in tqdm(chosen(names), desc="figures", unit="figure", disable=None):
        data = picture.file.data()
        figure, alt = picture.file.draw(**data)
        files.write(folder / picture.still, style.svg(figure, alt, f"{picture.digest(data)}, {DRAWN_BY}"))
        if hasattr(picture.file, "moving"):
            files.write(folder / f"{picture.name}.svg", picture.file.moving(**data))
    files.write(folder / "README.md", gallery_page())


def build_posters(folder: Path) -> None:
    """Both sheets, as SVG and as PDF."""
    for name, tag in SHEETS.items():
        data = POSTER.file.data(tag)
        (figure, alt), digest = POSTER.file.draw(**data), POSTER.digest(data)
        files.write(folder / f"{name}.svg", style.svg(figure, alt, f"{digest}, {DRAWN_BY}"))
        files.write(folder / f"{name}.pdf", pdf(figure, digest))


def pdf(figure: Figure, digest: str) -> bytes:
    """The figure as a PDF with its fonts inside; the digest is its keyword."""
    with matplotlib.rc_context(style.RC | {"pdf.fonttype": 42}):
        out = BytesIO()
        plain = dict.fromkeys(("CreationDate", "Creator", "Producer"))
        figure.savefig(out, format="pdf", metadata=plain | dict(Title=figure.get_suptitle(), Keywords=digest))
    return out.getvalue()


def chosen(names: list[str] | None) -> list[Picture]:
    """The pictures of these names, or all."""
    known = [HERO, LIVE, *(p.name for p in (*PICTURES, POSTER))]
    unknown = set(names or ()) - set(known)
    if unknown:
        raise ValueError(f"figure: got {', '.join(sorted(unknown))}; it takes {', '.join(known)}")
    return [p for p in PICTURES if not names or p.name in names]


def canonical(x):
    """Data as JSON can hold it, with floats rounded so that the last bits of a machine do not matter."""
    if isinstance(x, np.ndarray):
        return canonical(x.tolist())
    if is_dataclass(x):
        return {f.name: canonical(getattr(x, f.name)) for f in fields(x)}
    if isinstance(x, dict):
        return {str(canonical(k)): canonical(v) for k, v in x.items()}
    if isinstance(x, (list, tuple)):
        return [canonical(v) for v in x]
    if isinstance(x, (float, np.floating)):
        return f"{x:.6g}"
    if isinstance(x, Enum):
        return x.name
    return x.item() if isinstance(x, np.generic) else x


def gallery_page() -> str:
    """figures/README.md: each picture, its message, the chapter that shows it and the file that draws it."""
    parts = [
        "# The pictures\n\nGenerated by `python -m fa2_lab figures`; edit the code that draws them, not these files."
        " What is read from compiled kernels is recorded by `python -m fa2_studio.compiled`.\n"
    ]
    parts.append(
        f"## hero\n\n{hero.TITLE}.\n\n![{hero.TITLE}]({HERO}.svg)\n\nShown in the [README](../README.md)."
        f" Standing still, for print: [{HERO}_still.svg]({HERO}_still.svg)."
        f" Drawn by [plots/{HERO}.py](../fa2_lab/plots/{HERO}.py).\n"
    )
    for p in PICTURES:
        alt = p.sentence.replace('"', "'")
        chapter = f"Chapter: [{p.chapter}](../notebooks/{p.chapter}.ipynb)."
        parts.append(
            f"## {p.name.replace('_', ' ')}\n\n{p.sentence}\n\n![{alt}]({p.name}.svg)\n\n"
            + (chapter if p.chapter != "README" else "Shown in the [README](../README.md).")
            + (f" Standing still, for print: [{p.still}]({p.still})." if p.still != f"{p.name}.svg" else "")
            + f" Drawn by [plots/{p.name}.py](../fa2_lab/plots/{p.name}.py).\n"
        )
    sheets = ", ".join(f"[{name}]({name}.pdf) ([SVG]({name}.svg))" for name in SHEETS)
    parts.append(f"## posters\n\n{POSTER.sentence} {sheets}.\n")
    return "\n".join(parts)


def main(argv: list[str]) -> int:
    """The command line of `fa2-lab figures`."""
    parser = argparse.ArgumentParser(prog="fa2-lab figures", description="Draw the project's pictures.")
    parser.add_argument("names", nargs="*", help="pictures to draw; all, if none is named")
    parser.add_argument("--folder", type=Path, help="where to write them; figures/ of the checkout, if none is named")
    options = parser.parse_args(argv)
    folder = options.folder or files.checkout("figures without --folder") / "figures"
    wanted = chosen(options.names)
    files.check_writable(folder, "figures")
    build(folder, options.names)
    parts = {POSTER.name: len(SHEETS), HERO: 1, LIVE: 1}
    more = sum(n for name, n in parts.items() if not options.names or name in options.names)
    print(f"{len(wanted) + more} figures in {folder}")
    return 0
