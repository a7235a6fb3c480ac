"""What calls of one kind have found out: no check and no choice needs to be made twice.

A kind is all that checks and choices look at. Values of tensors, and where they lie, are no part of it.
"""

from torch.utils._python_dispatch import is_in_torch_dispatch_mode

KNOWN: dict = {}
MOST_KNOWN = 4096


def recall(q, k, v, lengths, causal, scale, dropout_p, return_lse, backend) -> tuple:
    """A call's kind, and who serves such calls; None in their place where there is none."""
    try:
        kind = (
            *(kind_of(q), kind_of(k), kind_of(v), lengths if lengths is None else kind_of(lengths)),
            *(causal, scale, dropout_p, return_lse, backend),
            *(type(causal), type(scale), type(dropout_p), type(return_lse)),  # for True == 1 == 1.0
            is_in_torch_dispatch_mode(),
        )
        return kind, KNOWN.get(kind)
    except (AttributeError, RuntimeError, TypeError):  # something else than it should be: the checks will say so
        return None, None


def kind_of(x) -> tuple:
    return type(x), x.layout, x.dtype, x.device, x.shape, x.stride()


def remember(kind: tuple | None, call) -> None:
    """From now on `call` serves calls of this kind."""
    if len(KNOWN) >= MOST_KNOWN:
        KNOWN.clear()
    if kind is not None:
        KNOWN[kind] = call


def forget() -> None:
    """From now on every check and choice is made anew."""
    KNOWN.clear()
