"""The table of all measured implementations, which all suites, pages and pictures share."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from torch.nn.attention import SDPBackend

from fa2_studio.bench.peers import dense, flex, hopper, packed
from fa2_studio.bench.problem import Problem

Prepare = Callable[[Problem], dense.Attend]
DETERMINISTIC_SUFFIX = " deterministic"  # suffix for the name of an implementation that must be deterministic


@dataclass(frozen=True)
class Implementation:
    """An implementation: how to prepare each kind of call, and the suites of dense problems that include it.

    A field is None if the implementation does not support that kind of call. "dense" stands for every suite of dense
    problems, and "sustained" stands for the same suites without pauses.
    """

    dense: Prepare | None = None
    suites: str = ""  # names of suites, separated by spaces
    deterministic: Prepare | None = None  # set only if the implementation has an argument for determinism
    decode: Prepare | None = None  # set only if decoding uses a different call from the dense one
    packed: Callable | None = None
    distribution: str = ""  # the installed package whose version is recorded
    compiles: bool = False  # if compilation takes seconds per shape, it is done before anything is timed


def dao_package(module: str, distribution: str, suites: str, **kinds) -> Implementation:
    """Return one of Dao's packages, such as flash_attn, as an implementation."""
    deterministic = partial(dense.package, module=module, deterministic=True)
    return Implementation(
        partial(dense.package, module=module), suites, deterministic, distribution=distribution, **kinds
    )


EVERYWHERE = "dense sustained sweep decode ladder train"
IMPLEMENTATIONS: dict[str, Implementation] = {
    "fa2_lab": Implementation(
        dense.ours, EVERYWHERE + " masks bias deterministic smoke", packed=packed.ours, compiles=True
    ),
    "fa2_lab portable": Implementation(
        partial(dense.ours, backend="portable"), "dense masks bias train ampere", compiles=True
    ),
    "fa2_lab padded": Implementation(packed=packed.padded_attention),
    "fa2_lab reference": Implementation(partial(dense.ours, backend="reference"), "smoke"),
    "torch": Implementation(dense.plain, "smoke"),
    "torch flash": Implementation(
        partial(dense.sdpa, backend=SDPBackend.FLASH_ATTENTION), "dense deterministic decode train ampere"
    ),
    "cuDNN": Implementation(partial(dense.sdpa, backend=SDPBackend.CUDNN_ATTENTION), EVERYWHERE),
    "torch math": Implementation(partial(dense.sdpa, backend=SDPBackend.MATH), "memory train"),
    "torch varlen_attn": Implementation(packed=packed.torch_varlen),
    "FlexAttention": Implementation(flex.flex, "dense masks bias", compiles=True),
    "flash_attn": dao_package("flash_attn", "flash-attn", "dense", packed=partial(packed.package, module="flash_attn")),
    "FlashAttention-3": dao_package(
        "flash_attn_interface",
        "flash_attn_3",
        EVERYWHERE + " masks deterministic",
        decode=dense.flash3_cache,
        packed=partial(packed.package, module="flash_attn_interface"),
    ),
    "FlashAttention-4": dao_package(
        "flash_attn.cute", "flash-attn-4", "dense sustained sweep deterministic", compiles=True
    ),
    "ThunderKittens": Implementation(hopper.thunder_kittens, "dense sustained", distribution=hopper.KITTENS),
    "TileLang": Implementation(hopper.tilelang, "dense sustained", distribution="tilelang", compiles=True),
    "TLX": Implementation(hopper.tlx, "dense sustained", distribution="fbtriton"),
}


def names(*suites: str) -> tuple[str, ...]:
    """Return the names of the implementations that take part in any of these suites.

    For "deterministic", each name is followed by the same name with the suffix DETERMINISTIC_SUFFIX.
    """
    chosen = [
        name for name, implementation in IMPLEMENTATIONS.items() if set(suites) & set(implementation.suites.split())
    ]
    return tuple(
        name + mode for name in chosen for mode in (("", DETERMINISTIC_SUFFIX) if "deterministic" in suites else ("",))
    )


def prepare(name: str, problem: Problem) -> dense.Attend:
    """Return an implementation's attention function for a problem. The suffix in its name makes it deterministic."""
    implementation = IMPLEMENTATIONS[name.removesuffix(DETERMINISTIC_SUFFIX)]
    if name.endswith(DETERMINISTIC_SUFFIX):
        return (implementation.deterministic or dense.deterministic(implementation.dense))(problem)
    return (implementation.decode if implementation.decode and problem.N_q == 1 else implementation.dense)(problem)


def values_of(field: str) -> dict[str, Callable]:
    """Return {name: value of the field `field`} for all implementations that set this field."""
    return {
        name: getattr(implementation, field)
        for name, implementation in IMPLEMENTATIONS.items()
        if getattr(implementation, field)
    }


def peers_among(names: Iterable[str]) -> list[str]:
    """Return those of the names that belong to other packages, in the order of the table."""
    return [name for name in IMPLEMENTATIONS if name in set(names) and not name.startswith("fa2_lab")]
