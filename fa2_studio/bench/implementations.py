"""The table of all measured implementations, which all suites, pages and pictures share."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from torch.nn.attention import SDPBackend

from fa2_studio.bench.peers import dense, flex, hopper, packed
from fa2_studio.bench.problem import Problem

Prepare = Callable[[Problem], dense.Attend]
SAME_BITS = " deterministic"  # suffix for the name of an implementation that must be deterministic


@dataclass(frozen=True)
class Implementation:
    """An implementation: how to prepare each kind of call, and the suites of dense problems that include it.

    A field is None if the implementation does not support that kind of call. "grid" stands for every suite over a grid
    of problems, and "sustained" stands for the same suites without pauses.
    """

    dense: Prepare | None = None
    suites: str = ""  # names of suites, separated by spaces
    deterministic: Prepare | None = None  # set only if the implementation has an argument for determinism
    decode: Prepare | None = None  # set only if decoding uses a different call from the dense one
    packed: Callable | None = None
    distribution: str = ""  # the installed package whose version is recorded
    compiles: bool = False  # if compilation takes seconds per shape, it is done before anything is timed


def dao(module: str, distribution: str, suites: str, **kinds) -> Implementation:
    """Return one of Dao's packages, such as flash_attn, as an implementation."""
    deterministic = partial(dense.package, module=module, deterministic=True)
    return Implementation(
        partial(dense.package, module=module), suites, deterministic, distribution=distribution, **kinds
    )


EVERYWHERE = "grid sustained sweep decode ladder train"
IMPLEMENTATIONS: dict[str, Implementation] = {
    "fa2_lab": Implementation(
        dense.ours, EVERYWHERE + " masks bias deterministic smoke", packed=packed.ours, compiles=True
    ),
    "fa2_lab portable": Implementation(
        partial(dense.ours, backend="portable"), "grid masks bias train ampere", compiles=True
    ),
    "fa2_lab padded": Implementation(packed=packed.padded_attention),
    "fa2_lab reference": Implementation(partial(dense.ours, backend="reference"), "smoke"),
    "torch": Implementation(dense.plain, "smoke"),
    "torch flash": Implementation(
        partial(dense.sdpa, backend=SDPBackend.FLASH_ATTENTION), "grid deterministic decode train ampere"
    ),
    "cuDNN": Implementation(partial(dense.sdpa, backend=SDPBackend.CUDNN_ATTENTION), EVERYWHERE),
    "torch math": Implementation(partial(dense.sdpa, backend=SDPBackend.MATH), "memory train"),
    "torch varlen_attn": Implementation(packed=packed.torch_varlen),
    "FlexAttention": Implementation(flex.flex, "grid masks bias", compiles=True),
    "flash_attn": dao("flash_attn", "flash-attn", "grid", packed=partial(packed.package, module="flash_attn")),
    "FlashAttention-3": dao(
        "flash_attn_interface",
        "flash_attn_3",
        EVERYWHERE + " masks deterministic",
        decode=dense.flash3_cache,
        packed=partial(packed.package, module="flash_attn_interface"),
    ),
    "FlashAttention-4": dao("flash_attn.cute", "flash-attn-4", "grid sustained sweep deterministic", compiles=True),
    "ThunderKittens": Implementation(hopper.thunder_kittens, "grid sustained", distribution=hopper.KITTENS),
    "TileLang": Implementation(hopper.tilelang, "grid sustained", distribution="tilelang", compiles=True),
    "TLX": Implementation(hopper.tlx, "grid sustained", distribution="fbtriton"),
}


def names(*suites: str) -> tuple[str, ...]:
    """Return the names of the implementations that take part in any of these suites.

    For "deterministic", each name is followed by the same name with the suffix SAME_BITS.
    """
    chosen = [name for name, who in IMPLEMENTATIONS.items() if set(suites) & set(who.suites.split())]
    return tuple(name + mode for name in chosen for mode in (("", SAME_BITS) if "deterministic" in suites else ("",)))


def prepare(name: str, problem: Problem) -> dense.Attend:
    """Return an implementation's attention function for a problem, deterministic if its name ends with SAME_BITS."""
    who = IMPLEMENTATIONS[name.removesuffix(SAME_BITS)]
    if name.endswith(SAME_BITS):
        return (who.deterministic or dense.deterministic(who.dense))(problem)
    return (who.decode if who.decode and problem.N_q == 1 else who.dense)(problem)


def preparing(kind: str) -> dict[str, Callable]:
    """Return {name: value of the field `kind`} for all implementations that set this field."""
    return {name: getattr(who, kind) for name, who in IMPLEMENTATIONS.items() if getattr(who, kind)}


def peers(names: Iterable[str]) -> list[str]:
    """Return those of the names that belong to other packages, in the order of the table."""
    return [name for name in IMPLEMENTATIONS if name in set(names) and not name.startswith("fa2_lab")]
