"""A function that somebody wrote, and how to ask it: its arguments by their names, its layout, library and dtype."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from fa2_lab.examine.cases import Question, case, rounded
from fa2_lab.examine.match import Answer, Variant, candidates

NAMES = {
    "q": "q query queries q_in xq",
    "k": "k key keys k_in xk",
    "v": "v value values v_in xv",
    "causal": "causal is_causal causal_mask use_causal_mask",
    "scale": "scale softmax_scale sm_scale tau scaling qk_scale",
    "mask": "attn_mask mask attention_mask",
    "bias": "attn_bias bias",
    "window": "window_size window sliding_window local_window_size window_left_right",
    "softcap": "softcap logits_soft_cap logit_softcap logit_cap soft_cap",
    "key_lengths": "key_lengths kv_lens seqused_k kv_lengths key_value_seq_lengths kv_len lengths cache_seqlens",
    "cu_seqlens": "cu_seqlens cu_seqlens_q cu_seqlens_k cu_seqlens_kv cu_q cu_k",
    "longest": "max_seqlen max_seqlen_q max_seqlen_k max_seqlen_kv longest",
    "sinks": "sinks sink s_aux learnable_sink attention_sinks",
    "dropout": "dropout_p dropout p_dropout dropout_rate",
    "seed": "seed rng_seed",
    "lse": "return_lse return_softmax_lse need_lse with_lse return_residual",
    "grouped": "enable_gqa",
    "O": "o out output",
    "L": "lse l",
}
ROLE = {name: role for role, names in NAMES.items() for name in names.split()}
LAYOUTS = {"bhnd": "(batch, heads, N, d)", "bnhd": "(batch, N, heads, d)", "hnd": "(heads, N, d)", "nd": "(N, d)"}
WHOLE = ("bhnd", "bnhd", "thd")  # a function that takes four dimensions is not asked with fewer
LAYOUTS |= {"thd": "packed (total, heads, d)"}
SIZES = ((1, 16), (16, 16), (64, 16), (64, 64), (128, 64), (128, 128))  # lengths are multiples of, head dimension
EPS = {"float64": 1.2e-7, "float32": 1.2e-7, "float16": 2.0**-11, "bfloat16": 2.0**-8}
GUARD = 1 << 14  # numbers before and after each input


class NotExamined(Exception):
    """The function did not take this case; the text says what happened."""


class Subject:
    """One function, asked in one library, dtype and layout."""

    def __init__(self, function: Callable, given: dict[str, Any] | None = None, device: str = "") -> None:
        self.function, self.given, self.device = function, given or {}, device
        self.name = getattr(function, "__name__", type(function).__name__)
        self.library, self.dtype, self.layout, self.multiple, self.d = "numpy", "float64", "bhnd", 1, 16
        self.also = ""  # another layout, in which it would be right
        self.fill = np.nan  # what lies before and after each input
        self.window_is_int, self.changed, self.overrun = False, False, False
        self.roles = self.read_signature()

    # The signature ------------------------------------------------------------------------------------------------

    def read_signature(self) -> dict[str, str]:
        """{parameter: role}, the first three being q, k and v where their names say nothing."""
        parameters = [
            p for p in signature(self.function).parameters.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ]
        named = {p.name: ROLE.get(p.name.lower(), "") for p in parameters if p.name not in self.given}
        roles = dict(named)
        if not {"q", "k", "v"} <= set(named.values()):
            for name, role in zip(list(named)[:3], "qkv", strict=False):
                roles[name] = role
        unknown = [p.name for p in parameters if not roles.get(p.name) and p.name in roles and p.default is p.empty]
        if not {"q", "k", "v"} <= set(roles.values()):
            raise NotExamined(f"{self.name} takes {len(named)} arguments; q, k and v are needed")
        if unknown:
            raise NotExamined(
                f"{self.name} needs {unknown[0]!r}, which is not known here: give it with --set {unknown[0]}=…"
            )
        self.defaults = {p.name: p.default for p in parameters}
        return {name: role for name, role in roles.items() if role}

    def takes(self, role: str) -> bool:
        return role in self.roles.values()

    def tiles(self) -> tuple[int, ...]:
        """Tile sizes that may be the function's: numbers in its signature, its code and its module's capitals."""
        code = getattr(inspect.unwrap(self.function), "__code__", None)
        spaces = getattr(inspect.unwrap(self.function), "__globals__", {})
        numbers = [*self.defaults.values(), *self.given.values(), *(code.co_consts if code else ())]
        numbers += [x for name, x in spaces.items() if name.upper() == name]
        return tuple(sorted({x for x in numbers if type(x) is int and 2 <= x <= 256} | {1, 2, 4, 8, 16, 32, 64, 128}))

    # Finding out how to ask ---------------------------------------------------------------------------------------

    def settle(self, layout: str = "", library: str = "", dtype: str = "") -> None:
        """Choose library, dtype, sizes and layout: those that give what attention should give, else those that run."""
        libraries = [library] if library else self.libraries()
        layouts = [layout] if layout else ["thd"] if self.takes("cu_seqlens") else ["bhnd", "bnhd", "hnd", "nd"]
        tried: list[tuple] = []
        failure = ""
        for multiple, d in SIZES:
            for self.library in libraries:
                for chosen in [dtype] if dtype else dtypes(self.library):
                    for self.layout in layouts:
                        self.multiple, self.d, self.dtype = multiple, d, chosen
                        try:
                            tried.append((self.agreement(), self.library, self.dtype, self.layout))
                            if tried[-1][0] == 4 and self.layout in WHOLE:
                                return
                        except NotExamined as refusal:
                            failure = failure or f"as {self.library} {self.dtype} {LAYOUTS[self.layout]}, {refusal}"
                    if tried:
                        whole = [x for x in tried if x[-1] in WHOLE] or tried
                        _, self.library, self.dtype, self.layout = max(whole, key=lambda x: x[0])
                        self.also = next((LAYOUTS[x[-1]] for x in tried if x not in whole and x[0] == 4), "")
                        return
        raise NotExamined(failure)

    def settle_window(self) -> None:
        """Whether a window is one number or two."""
        default = next((self.defaults[name] for name, role in self.roles.items() if role == "window"), ())
        asked = case("window", 8 * self.multiple, d=self.d, window=(4, 4))
        if not isinstance(default, tuple):
            for self.window_is_int in (False, True):
                with suppress(NotExamined):
                    self.ask(asked)
                    return

    def libraries(self) -> list[str]:
        """The libraries that the function's module uses, and the installed others after them."""
        function = inspect.unwrap(self.function)
        spaces, code = getattr(function, "__globals__", {}), getattr(function, "__code__", None)
        own = [spaces.get(x) for x in (code.co_names if code else ())]
        found = []
        for values in (own, spaces.values(), [function]):
            modules = {
                (x.__name__ if inspect.ismodule(x) else str(getattr(x, "__module__", ""))).split(".")[0] for x in values
            }
            modules |= {"torch"} if modules & {"triton", "_C", "torch._C"} else set()
            found += [x for x in ("torch", "jax", "numpy") if x in modules]
        return list(dict.fromkeys([*found, "numpy", *(["torch"] if has("torch") else [])]))

    def agreement(self) -> float:
        """4: right, or causal. 3: a known mistake. 2: each head answers for itself. 1: it runs."""
        n = 8 if self.multiple == 1 else self.multiple
        asked = case("probe", n, d=self.d, batch=1 if self.layout == "thd" else 2, heads=3)
        first = self.ask(asked)
        if any(first.fits(Variant(names), ("O",)) for names in ((), ("always-causal",))):
            return 4
        if any(first.fits(s, ("O",)) for s in candidates(Variant(), "O", (n,))):
            return 3
        other = asked.v.copy()
        other[0, 0] += 1
        more = self.ask(Question("probe", asked.q, asked.k, other, asked.dO)).outputs["O"]
        moved = np.abs(more - first.outputs["O"]).max(axis=(2, 3)) > 1e-6  # (batch, heads)
        return 2 if moved[0, 0] and moved.sum() == 1 else 1

    # Asking -------------------------------------------------------------------------------------------------------

    def fitted(self, case: Question) -> Question:
        """A packed sequence has no batch: of a case with one its first entry."""
        return case.entry(slice(1)) if self.layout == "thd" and case.q.shape[0] > 1 else case

    def can(self, case: Question) -> str:
        """The option of a case that the function does not take; empty if it takes all."""
        masks = ("mask", "bias") if case.group == "bias" else ("mask",)
        lacks = [x for x in case.options if not any(map(self.takes, masks if x == "mask" else (x,)))]
        if not lacks and case.k.shape[1] != case.q.shape[1] and self.layout in ("nd",):
            return "grouped heads"
        left, right = case.options.get("window") or (0, 0)
        if self.window_is_int and left != right:
            return "windows with two sides"
        return lacks[0] if lacks else ""

    def ask(
        self, case: Question, place: str = "guarded", fill: float | None = None, expanded_dO: bool = False
    ) -> Answer:
        """The function's answer to a case; NotExamined if it raises or returns something else than numbers."""
        case = case.rounded(self.hold) if self.dtype != "float64" else case
        fill = self.fill if fill is None else fill
        outputs: dict[str, list] = {}
        pieces = list(self.pieces(case))
        for q, k, v, dO, dL, options in pieces:
            tensors = [self.tensor(x, place, fill) for x in (q, k, v)]
            try:
                got = self.call(tensors, options, dO, dL, case, expanded_dO)
            except NotExamined:
                if not case.gradients:
                    raise
                return self.ask(replace(case, gradients=False), place, fill)
            for name, x in got.items():
                outputs.setdefault(name, []).append(x)
            kept = [self.numbers(x) for x in tensors]
            self.changed |= any(not np.array_equal(a, self.hold(b)) for a, b in zip(kept, (q, k, v), strict=True))
        whole: dict[str, np.ndarray] = {}
        for name, parts in outputs.items():
            like = {"dQ": case.q, "dK": case.k, "dV": case.v}.get(name, case.q)
            shape = like.shape[:3] if name == "L" else like.shape
            with suppress(ValueError):
                whole[name] = self.canonical(parts, shape)
        if "O" not in whole:
            shapes = [f"shape {x.shape}" for x in outputs.get("O", [])]
            raise NotExamined(f"it returns {(shapes or ['no array'])[0]} for q of shape {self.shape_of(pieces)}")
        return Answer(case, whole, EPS[self.dtype])

    def shape_of(self, pieces: list) -> tuple[int, ...]:
        return pieces[0][0].shape

    def hold(self, x: np.ndarray) -> np.ndarray:
        """The numbers that the dtype can hold, in float64."""
        if self.dtype == "bfloat16":
            return rounded(x, 8)
        return x.astype(self.dtype).astype(np.float64)

    def pieces(self, case: Question) -> Iterator[tuple]:
        """A case in the function's layout: one call, or one for each batch entry or head."""
        group, o = case.q.shape[1] // case.k.shape[1], case.options
        arrays = (case.q, case.k, case.v, case.dO)
        if self.layout in ("bhnd", "bnhd"):
            turn = (lambda x: x.swapaxes(1, 2)) if self.layout == "bnhd" else (lambda x: x)
            yield *map(turn, arrays), case.dL, dict(o)
        elif self.layout == "thd":
            flat = [x.swapaxes(1, 2).reshape(-1, x.shape[1], x.shape[3]) for x in arrays]
            yield *flat, case.dL, dict(o)
        else:
            for b in range(case.q.shape[0]):
                options = {x: y[b : b + 1] if x == "key_lengths" else y[0] if x == "mask" else y for x, y in o.items()}
                if self.layout == "hnd":
                    yield *(x[b] for x in arrays), None if case.dL is None else case.dL[b], options
                    continue
                for h in range(case.q.shape[1]):
                    one = {
                        x: y[h] if x in ("mask", "sinks") else y[0] if x == "key_lengths" else y
                        for x, y in options.items()
                    }
                    q, k, v, dO = case.q[b, h], case.k[b, h // group], case.v[b, h // group], case.dO[b, h]
                    yield q, k, v, dO, None if case.dL is None else case.dL[b, h], one

    def canonical(self, parts: list[np.ndarray], shape: tuple[int, ...]) -> np.ndarray:
        """What came back, in the cases' layout; a ValueError if it has another shape."""
        b, h, n = shape[:3]
        x = np.stack(parts)
        order = {"bhnd": (b, h, n), "bnhd": (b, n, h), "hnd": (b, h, n), "nd": (b, h, n), "thd": (b, n, h)}[self.layout]
        native = {"bhnd": order, "bnhd": order, "hnd": order[1:], "nd": order[2:], "thd": (b * n, h)}[self.layout]
        if len(shape) == 3:  # L: often (batch, heads, N) whatever the layout, or with one more axis
            x = x[..., 0] if x.shape[-1] == 1 and x[0].ndim == len(native) + 1 else x
            if x[0].shape != native and x[0].size == b * h * n // len(parts) and self.layout in ("bnhd", "thd"):
                return x[0].reshape(b, h, n) if self.layout == "bnhd" else x[0].reshape(h, b, n).swapaxes(0, 1)
        if x[0].shape[: len(native)] != native or x[0].shape[len(native) :] != shape[3:]:
            raise ValueError
        x = x.reshape(*order, *shape[3:])
        return x.swapaxes(1, 2) if self.layout in ("bnhd", "thd") else x

    def call(
        self, tensors: list, options: dict, dO: np.ndarray, dL: np.ndarray | None, case: Question, expanded: bool
    ) -> dict:
        """O, L and the gradients of one call, as arrays."""
        roles = dict(zip("qkv", tensors, strict=True))
        N_q, N_k = (x.shape[2] for x in (case.q, case.k))
        ask = dict(options)
        if case.group == "bias" and self.takes("bias"):
            ask["bias"] = ask.pop("mask")
        if self.window_is_int and "window" in ask:
            ask["window"] = ask["window"][0]
        if self.layout == "thd":
            ask["longest"] = max(N_q, N_k)
        neutral = dict(window=(-1, -1), scale=self.d**-0.5, key_lengths=np.full(case.q.shape[0], N_k))
        neutral |= dict(dropout=0.0, seed=0, sinks=np.full(case.q.shape[1], -np.inf))
        for name, role in self.roles.items():
            if self.defaults[name] is inspect.Parameter.empty and role not in ask:
                ask[role] = neutral.get(role)
        ask |= dict(lse=True, grouped=case.k.shape[1] != case.q.shape[1])
        for name in ("O", "L"):
            if self.takes(name):
                roles[name] = self.tensor(
                    np.full(tensors[0].shape[: None if name == "O" else -1], np.nan), "guarded", -7.0
                )
        arguments = dict(self.given)
        for name, role in self.roles.items():
            if role in roles:
                arguments[name] = roles[role]
            elif role == "cu_seqlens":
                starts = (
                    ask[role]
                    if ask.get(role) is not None
                    else np.arange(case.q.shape[0] + 1) * (N_k if "k" in name[-3:] else N_q)
                )
                arguments[name] = self.integers(starts)
            elif role in ask:
                arguments[name] = self.option(ask[role])
        if self.takes("causal"):
            for name, role in self.roles.items():
                if role == "causal":
                    arguments[name] = bool(options.get("causal", False))
        wants = case.gradients and self.library == "torch"
        if wants:
            for x in tensors:
                x.requires_grad_()
        try:
            with np.errstate(all="ignore"), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = invoke(self.function, arguments)
                if result is None:  # it writes into what it was given
                    result = [roles[x] for x in ("O", "L") if x in roles]
                    self.overrun |= any(self.guards_changed(x) for x in result)
                found = list(result) if isinstance(result, (tuple, list)) else [result]
                arrays = dict(O=self.numbers(found[0]))
                if (
                    len(found) == 2
                    and getattr(found[1], "ndim", 0) >= tensors[0].ndim - 1
                    and found[1].shape[-1] != N_k
                ) or self.takes("lse"):
                    arrays["L"] = self.numbers(found[1])
                if wants and getattr(found[0], "requires_grad", False):
                    arrays |= self.backward(found, tensors, dO, dL, "L" in arrays, expanded)
            return arrays
        except Exception as failure:
            raise NotExamined(
                f"{type(failure).__name__}: {str(failure).strip().splitlines()[0][:200] if str(failure) else ''}"
            ) from failure

    def backward(
        self, found: list, tensors: list, dO: np.ndarray, dL: np.ndarray | None, has_L: bool, expanded: bool
    ) -> dict:
        """The gradients that torch's autograd finds; none for the loss with L where L takes none."""
        import torch

        if dL is not None and not (has_L and found[1].requires_grad):
            return {}
        outputs, gradients = [found[0]], [self.tensor(dO, "plain").to(found[0].dtype)]
        if expanded:
            gradients = [gradients[0].new_ones(()).expand(found[0].shape)]
        if dL is not None:
            outputs.append(found[1])
            flat = dL.swapaxes(0, 1).reshape(dL.shape[-2], -1) if dL.ndim == 3 else dL
            orders = [x for x in (dL, dL.swapaxes(-1, -2), flat, flat.T) if x.shape == found[1].squeeze(-1).shape]
            if not orders:
                return {}
            gradients.append(self.tensor(orders[0].reshape(found[1].shape), "plain").to(found[1].dtype))
        got = torch.autograd.grad(outputs, tensors, gradients, allow_unused=True)
        return {name: self.numbers(x) for name, x in zip(("dQ", "dK", "dV"), got, strict=True) if x is not None}

    # Arrays -------------------------------------------------------------------------------------------------------

    def tensor(self, x: np.ndarray, place: str, fill: float = np.nan) -> Any:
        """x as an array of the library, with guard numbers before and after it, or as a view."""
        gap = 3 if place == "gapped" else 0
        order = {"turned": (*range(x.ndim - 2), x.ndim - 1, x.ndim - 2), "swapped": (1, 0, *range(2, x.ndim))}
        shape = list(x.shape)
        if gap:
            shape[-2] += gap
        axes = order.get(place, tuple(range(x.ndim)))
        stored = np.full([shape[a] for a in axes], fill)
        buffer = np.concatenate([np.full(GUARD, fill), stored.ravel(), np.full(GUARD, fill)])
        if self.library == "jax":
            import jax.numpy as jnp

            return jnp.asarray(x, dtype=self.dtype)
        if self.library == "torch":
            import torch

            memory: Any = torch.from_numpy(buffer).to(getattr(torch, self.dtype)).to(self.device or "cpu")
            view: Any = memory[GUARD : GUARD + stored.size].view(stored.shape).permute(*np.argsort(axes).tolist())
            view = view.narrow(x.ndim - 2, 0, x.shape[-2]) if gap else view
            view.copy_(torch.from_numpy(np.ascontiguousarray(x)))
            return view[:1].expand(view.shape) if place == "expanded" else view.detach()
        array: Any = buffer.astype(self.dtype)
        view = array[GUARD : GUARD + stored.size].reshape(stored.shape).transpose(np.argsort(axes))
        view = view[..., : x.shape[-2], :] if gap else view
        view[...] = x
        return np.broadcast_to(view[:1], view.shape) if place == "expanded" else view

    def guards_changed(self, x: Any) -> bool:
        """Whether something was written before or after an output, which lies between guards of −7."""
        import_torch = self.library == "torch"
        whole = x.new_empty(0).set_(x.untyped_storage()).cpu().numpy() if import_torch else x.base
        return bool((whole[:GUARD] != -7).any() or (whole[-GUARD:] != -7).any())

    def integers(self, x: np.ndarray) -> Any:
        if self.library == "torch":
            import torch

            return torch.as_tensor(np.asarray(x), dtype=torch.int32, device=self.device or "cpu")
        return np.asarray(x, dtype=np.int32)

    def option(self, x: Any) -> Any:
        """An option's value as the library wants it."""
        if not isinstance(x, np.ndarray):
            return x
        if x.dtype.kind in "iu":
            return self.integers(x) if x.ndim else int(x)
        if self.library == "torch":
            import torch

            dtype = torch.bool if x.dtype == bool else getattr(torch, self.dtype)
            return torch.tensor(x, dtype=dtype, device=self.device or "cpu")
        return x if x.dtype == bool else x.astype(self.dtype)

    def numbers(self, x: Any) -> np.ndarray:
        """An array of any library in float64."""
        if hasattr(x, "detach"):
            x = x.detach().double().cpu().numpy()
        return np.array(x, dtype=np.float64)


def invoke(function: Callable, arguments: dict[str, Any]) -> Any:
    """Call it: positional-only and unnamed parameters in their order, all others by name."""
    parameters = signature(function).parameters.values()
    first = [p.name for p in parameters if p.kind is p.POSITIONAL_ONLY]
    return function(*(arguments.pop(x) for x in first if x in arguments), **arguments)


def signature(function: Callable) -> inspect.Signature:
    """A function's signature; of a built-in that has none, what its docstring begins with."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        found = re.search(r"\w+\((.*?)\)\s*->", function.__doc__ or "q(q, k, v) ->", re.DOTALL)
        names = re.findall(r"(\w+)(?:\s*:[^,=]*)?(=)?[^,]*", found.group(1)) if found else []
        kind, none = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
        return inspect.Signature([inspect.Parameter(x, kind, default=None if given else none) for x, given in names])


def has(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None


def dtypes(library: str) -> tuple[str, ...]:
    return ("float64", "float32") if library == "numpy" else ("float32", "float16", "bfloat16")
