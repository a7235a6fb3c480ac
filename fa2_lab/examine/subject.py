"""A function to be examined, and how to call it: the roles of its arguments, its layout, its library and its dtype.

The role of an argument is recognized by the argument's name.
"""

from __future__ import annotations

import inspect
import re
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from copy import copy
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from fa2_lab.examine.attention import attention
from fa2_lab.examine.cases import BITS, OPEN, PAGE, AttentionCase, paged, rounded
from fa2_lab.examine.catalogue import ROLES
from fa2_lab.examine.match import GRADIENTS, RIGHT, TILES, Answer

WHOLE = {"bhnd": "(batch, heads, N, d)", "bnhd": "(batch, N, heads, d)", "thd": "packed (total, heads, d)"}
WHOLE |= {"bhd": "(batch, heads, d) of one query, with k and v (batch, N, heads, d)"}
LAYOUTS = WHOLE | {"hnd": "(heads, N, d)", "nd": "(N, d)", "flat": "(batch, N, heads · d)"}
LIBRARIES = ["numpy", *filter(find_spec, ("torch", "jax"))]
ALWAYS = {"causal", "heads", "lse", "longest", "grouped", "cu_seqlens", "cu_seqlens_k"}  # passed even with usual values
OF_PAGES = {"pages", "page", "key_lengths"}  # always passed to a function with pages
GIVEN = {"q", "k", "v", "qkv", "dO", "O", "L"}
LIMIT = 60  # seconds that one call may take
NO_GPU = " Triton found no GPU. To interpret its kernels, import fa2_lab.kernels before triton."
FENCE = -7.0  # value of the guard elements around an output
MAKERS = {"empty", "empty_like", "new_empty", "zeros", "zeros_like", "new_zeros", "full", "full_like", "new_full"}


class NotExamined(Exception):
    """Raised if the function cannot run a case. The message gives the reason."""


class Endless(BaseException):
    """Raised if a call does not return in time. The examination cannot continue after this error."""


class Subject:
    """The function under examination, and the library, dtype and layout with which it is called."""

    def __init__(self, function: Callable, given: dict[str, Any] | None = None, device: str = "") -> None:
        self.function, self.given, self.device = function, given or {}, device
        self.name = getattr(function, "__name__", type(function).__name__)
        self.library, self.dtype, self.layout, self.multiple, self.d = "numpy", "float64", "bhnd", 1, 16
        self.also = ""  # another layout with which the output is correct
        self.place: tuple[str, ...] | str = ""  # memory layout of the inputs: one for all, or one for each
        self.fill = np.nan  # the value in memory before and after each input
        self.unset: float | None = None  # value that fills the results of torch.empty
        self.before_call: Callable[[AttentionCase], object] = lambda case: None  # receives each case
        self.no_gradients = ""  # the reason, if the function has no gradients
        self.no_groups = False  # whether it writes past its outputs if heads share keys
        self.gives_O = True  # False for a backward function that returns no O
        self.happened: set[str] = set()  # mistakes noticed during a call
        self.padding_keeps = False  # whether True in a padding mask marks a key that takes part
        self.last: tuple[Any, np.ndarray] | None = None  # what the last call returned, and a copy of its values
        self.eps = 0.0  # the spacing of numbers near 1, if it is larger than the dtype's
        function = getattr(function, "forward", function)  # for a torch.nn.Module
        parameters = [p for p in signature(function).parameters.values() if p.kind < 4 and p.kind != p.VAR_POSITIONAL]
        self.defaults = {p.name: p.default for p in parameters}
        self.kinds = {p.name: p.kind for p in parameters}
        named = {name: ROLES.get(name.lower(), "") for name in self.defaults if name not in self.given}
        if "qkv" not in named.values() and not {"q", "k", "v"} <= set(named.values()):
            named |= dict(zip(list(named)[:3], "qkv", strict=False))
        self.roles = {name: role for name, role in named.items() if role}
        if not (self.takes("qkv") or all(map(self.takes, "qkv"))):
            raise NotExamined(f"{self.name} takes {len(named)} arguments; q, k and v are needed")
        windows = [self.defaults[name] for name, role in self.roles.items() if role == "window"]
        required = [x for x in windows if x is inspect.Parameter.empty or (type(x) is int and x > 0)]
        self.window_is_int = self.window_is_always = bool(required)
        self.window_may_be_open = any(isinstance(x, tuple) and -1 in x for x in windows)
        for name in named:
            if not named[name] and self.defaults[name] is inspect.Parameter.empty:
                raise NotExamined(f"{self.name} needs {name!r}, which is not known here: give it with --set {name}=…")
        self.unused = [name for name in named if not named[name]]
        function = inspect.unwrap(function)
        self.code, self.space = getattr(function, "__code__", None), getattr(function, "__globals__", {})

    def like(self, **how: Any) -> Subject:
        """Return a copy of this Subject with the attributes in `how`, such as dtype, replaced."""
        other = copy(self)
        vars(other).update(how)
        return other

    def takes(self, role: str) -> bool:
        return role in self.roles.values()

    def has_kernels(self, *kinds: str) -> bool:
        """Return whether the function's module contains Triton kernels of these kinds."""
        return any(type(x).__name__ in kinds for x in self.space.values())

    def calls_kernels(self) -> bool:
        """Return whether the function uses a Triton kernel, directly or through functions and classes of its module."""
        inside: list = [self.code]
        seen: set = set()
        while inside:
            x = inside.pop()
            x = getattr(x, "__func__", x)
            if type(x).__name__ in ("InterpretedFunction", "JITFunction", "Autotuner", "Heuristics"):
                return True
            inside += vars(x).values() if isinstance(x, type) and x.__module__ == self.space.get("__name__") else ()
            code = getattr(x, "__code__", x)
            if hasattr(code, "co_names") and code not in seen:
                seen.add(code)
                inside += [*code.co_consts, *(self.space[name] for name in code.co_names if name in self.space)]
        return False

    def tiles(self) -> tuple[int, ...]:
        """Return tile sizes that the function may use: the usual ones, and the numbers found in its module."""
        module, numbers = self.space.get("__name__"), [*self.defaults.values(), *self.given.values()]
        inside = [*(self.code.co_consts if self.code else ())]
        inside += [x for name, x in self.space.items() if name.upper() == name]
        inside += [x for x in self.space.values() if getattr(x, "__module__", "") == module]
        while inside:  # functions, classes and kernels, and what they contain
            x = getattr(x := inside.pop(), "fn", x)
            x = getattr(x, "__func__", x)
            numbers.append(x)
            inside += getattr(getattr(x, "__code__", x), "co_consts", ())
            inside += getattr(x, "__defaults__", None) or ()
            inside += vars(x).values() if isinstance(x, type) and x.__module__ == module else ()
        return tuple(sorted({x for x in numbers if type(x) is int and 2 <= x <= 256} | set(TILES)))

    def fitted(self, case: AttentionCase) -> AttentionCase:
        """Return the case with the function's softcap.

        If the layout is thd, return its first batch entry alone, and if the layout is bhd, its last query alone.
        """
        cap = next((self.defaults[name] for name, role in self.roles.items() if role == "softcap"), 0)
        if type(cap) in (int, float) and cap > 0:  # it always caps its scores
            case = replace(case, options=dict(softcap=cap) | case.options)
        if self.layout == "bhd":
            last = {x: getattr(case, x)[:, :, -1:] for x in ("q", "dO", "dL") if getattr(case, x) is not None}
            case = replace(case, **last)
        return case.part(slice(1)) if self.layout == "thd" else case

    def lacks(self, case: AttentionCase) -> str:
        """Return an option or a property of the case that the function does not support, or "" if there is none."""
        names = dict(mask=("mask", "bias") if case.group.startswith("bias") else ("mask",))
        names["key_lengths"] = ("key_lengths", "padding")
        if lacks := [x for x in case.options if not any(map(self.takes, names.get(x, (x,))))]:
            return lacks[0]
        ungrouped = self.no_groups or self.layout in ("nd", "flat") or self.takes("qkv")
        if case.k.shape[1] != case.q.shape[1] and ungrouped:
            return "grouped heads"
        of_keys = self.layout != "thd" or self.takes("cu_seqlens_k")
        if case.k.shape[2] != case.q.shape[2] and (self.takes("qkv") or not of_keys):
            return "other lengths of keys than of queries"
        k = np.repeat(case.k, case.q.shape[1] // case.k.shape[1], axis=1)
        own_size = self.layout == "flat" or any(map(self.takes, ("qkv", "O", "dO", "pages")))
        if case.v.shape[3] != case.q.shape[3] and own_size:
            return "a head dimension of v of its own"
        if self.dtype == "float16" and case.made != (1.0, 0.0) and np.abs(case.q @ k.swapaxes(2, 3)).max() > 6e4:
            return "products of Q and K beyond float16"
        if case.dL is not None and self.takes("dO"):
            return "the gradient of L"
        left, right = case.options.get("window") or (0, 0)
        if OPEN in (left, right) and not self.window_may_be_open:
            return "windows with an open side"
        if self.window_is_int and left == 0 and case.options.get("window"):
            return "windows of the row's own key alone"
        return "windows with two sides" if self.window_is_int and left != right else ""

    def ask(self, case: AttentionCase, gradients: bool = True) -> Answer:
        """Call the function on a case, and return its Answer, with the gradients if `gradients` is set.

        Raise NotExamined if the call fails or if its result is not an array of the right shape.
        """
        self.before_call(case)
        case = case.rounded(self.hold) if self.dtype != "float64" else case
        gradients = gradients and case.gradients and not self.takes("pages")
        outputs: dict[str, list] = {}
        is_past = False
        for part in self.parts(case):
            k, v = (paged(x)[0] if self.takes("pages") else x for x in (part.k, part.v))
            inputs = [self.turned(x) for x in (part.q, k, v)]
            places = (self.place,) * 3 if isinstance(self.place, str) else self.place
            tensors = [self.array(x, place, self.fill) for x, place in zip(inputs, places, strict=True)]
            try:
                with np.errstate(all="ignore"), warnings.catch_warnings(), fenced(self.library, self.unset) as ends:
                    warnings.simplefilter("ignore")
                    found = {name: numbers(x) for name, x in self.call(tensors, part, gradients).items()}
                is_past |= any(bool((end != FENCE).any()) for end in ends)
            except Exception as failure:
                if gradients and not self.takes("dO"):
                    answer = self.ask(case, gradients=False)
                    self.no_gradients = self.no_gradients or f"{type(failure).__name__}: {failure}".split("\n")[0]
                    return answer
                said = str(failure).strip().split("\n")[0][:100]
                said += NO_GPU if "active drivers" in said else ""
                raise NotExamined(f"{type(failure).__name__}: {said}".removesuffix(": ")) from failure
            if "O" not in found:
                raise NotExamined("it returns nothing, and takes no array to write O into")
            if found["O"].shape != (*inputs[0].shape[:-1], inputs[2].shape[-1]):
                raise NotExamined(f"it returns shape {found['O'].shape} for q of shape {inputs[0].shape}")
            like = {"O": part.dO, "L": part.q[..., 0], "dQ": part.q, "dK": part.k, "dV": part.v}
            for name, x in found.items():
                outputs.setdefault(name, []).append(self.turned_back(x, like[name].shape))
            if not all(np.array_equal(numbers(a), b, True) for a, b in zip(tensors, inputs, strict=True)):
                self.happened.add("inputs-changed")
        known = {name: np.concatenate(x) for name, x in outputs.items() if not any(y is None for y in x)}
        whole = {name: x.reshape(case.q.shape[0], -1, *x.shape[2:]) for name, x in known.items()}
        answer = Answer(case, whole, max(2.0 ** -BITS[self.dtype], self.eps))
        if is_past and case.q.shape[1] != case.k.shape[1] and not answer.fits(RIGHT, ("O",)):
            self.no_groups = True
            raise NotExamined("it does not compute grouped heads, and writes past the end of its outputs instead")
        self.happened |= {"writes-past-end"} if is_past else set()
        return answer

    def parts(self, case: AttentionCase) -> list[AttentionCase]:
        """Split a case into one case for each separate call.

        In the layout hnd, each batch entry needs its own call. In the layout nd, each head does. In any other layout,
        the case is not split.
        """
        if self.layout not in ("hnd", "nd"):
            return [case]
        entries = [case.part(slice(b, b + 1)) for b in range(case.q.shape[0])]
        heads = [slice(h, h + 1) for h in range(case.q.shape[1])]
        return entries if self.layout == "hnd" else [x.part(heads=h) for x in entries for h in heads]

    def turned(self, x: np.ndarray) -> np.ndarray:
        """Return x (batch, heads, N, d) converted to the function's layout."""
        x = x.swapaxes(1, 2) if self.layout in ("bnhd", "flat", "thd", "bhd") else x
        if self.layout == "bhd":
            return x[:, 0] if x.shape[1] == 1 else x
        return x.reshape(*x.shape[:2], -1) if self.layout == "flat" else x[(0,) * (4 - len(self.layout))]

    def turned_back(self, x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray | None:
        """Convert the output x from the function's layout to `shape`, (batch, heads, N, d) or (batch, heads, N) for L.

        Return None if x cannot be converted to this shape.
        """
        if self.layout == "bhd" and shape[2] == 1:
            return x.reshape(shape) if x.shape[:2] == shape[:2] else None
        if len(shape) == 4 and self.layout == "flat":
            return x.reshape(x.shape[0], -1, *shape[1::2]).swapaxes(1, 2)
        if len(shape) == 4:
            x = x.swapaxes(-2, -3) if self.layout in ("bnhd", "thd", "bhd") else x
        elif x.ndim == len(self.layout) and x.shape[-1] == 1:
            x = x[..., 0]
        x = x.reshape([1] * (len(shape) - x.ndim) + list(x.shape))
        return next((y for y in (x, x.swapaxes(-1, -2)) if y.shape == shape), None)

    def options(self, case: AttentionCase) -> dict[str, Any]:
        """Return the options of a case as keyword arguments, with the function's names and in its layout."""
        (batch, heads, N_q, _), N_k = case.q.shape, case.k.shape[2]
        known: dict[str, Any] = dict(causal=False, lse=True, grouped=case.k.shape[1] != heads, page=PAGE, seed=0)
        known |= dict(heads=heads, window=(-1, -1), scale=case.q.shape[3] ** -0.5, dropout=0.0, slopes=np.zeros(heads))
        known |= dict(key_lengths=np.full(batch, N_k), sinks=np.full(heads, -np.inf), cu_seqlens=np.array([0, N_q]))
        known["cu_seqlens_k"] = case.options.get("cu_seqlens", np.array([0, N_k]))
        known["mask"] = known["kept"] = np.ones((batch, heads, N_q, N_k), dtype=bool)
        known |= case.options
        of_q, of_k = (int(np.diff(known[name]).max()) for name in ("cu_seqlens", "cu_seqlens_k"))
        longest = {"_q": of_q, "_k": of_k, "kv": of_k}  # chosen by the end of the argument's name
        known["padding"] = (np.arange(N_k) >= known["key_lengths"][:, None]) != self.padding_keeps
        if self.layout == "nd":
            known |= {name: known[name][0] for name in ("key_lengths", "sinks", "slopes")}
        if self.layout in ("hnd", "nd"):
            known |= {name: known[name][(0,) * (4 - len(self.layout))] for name in ("mask", "kept")}
        if self.takes("pages"):
            known["pages"] = paged(case.k)[1]
        passed = set(case.options) | ALWAYS | (OF_PAGES if self.takes("pages") else set())
        if case.group.startswith("bias") and self.takes("bias"):
            known["bias"] = known.pop("mask")
            passed.add("bias")
        if "key_lengths" in passed and self.takes("padding"):
            passed.add("padding")
        known["window"] = tuple(-1 if x == OPEN else x for x in known["window"])
        if self.window_is_always:
            passed.add("window")
            known |= {} if "window" in case.options else dict(window=(N_q + N_k,) * 2)
        if self.window_is_int:
            known["window"] = known["window"][0]
        values: dict[str, Any] = {}
        for name, role in self.roles.items():
            if role in passed or (self.defaults[name] is inspect.Parameter.empty and role not in GIVEN):
                known["longest"] = longest.get(name[-2:].lower(), max(of_q, of_k))
                values[name] = known.get(role)
        return values

    def call(self, tensors: list, case: AttentionCase, gradients: bool) -> dict[str, Any]:
        """Call the function once, and return its outputs as {"O": …, "L": …, "dQ": …, "dK": …, "dV": …}.

        L is omitted if the function does not return it, and the gradients if `gradients` is not set. The gradients are
        those that the function returns, or those that torch's autograd computes.
        """
        is_backward, roles = self.takes("dO"), dict(zip("qkv", tensors, strict=True))
        is_taped = gradients and self.library == "torch" and not is_backward
        for x in tensors if is_taped else ():
            x.requires_grad_()
        if self.takes("qkv"):
            stack = import_module("jax.numpy" if self.library == "jax" else self.library).stack
            roles["qkv"] = stack(tensors, -4 if self.layout in ("bhnd", "hnd") else -3)
        O, L = np.full(tensors[0].shape, np.nan), np.full(tensors[0].shape[:-1], np.nan)  # for it to write or read
        if is_backward:
            right = attention(case)
            O, L = self.turned(right["O"]), right["L"][(0,) * (4 - len(self.layout))]
            roles["dO"] = self.array(self.turned(case.dO))
        roles |= {x: self.array(y, fill=FENCE) for x, y in (("O", O), ("L", L)) if self.takes(x)}
        arguments = self.given | {name: self.option(x) for name, x in self.options(case).items()}
        arguments |= {name: roles[role] for name, role in self.roles.items() if role in roles}
        arrays = [arguments[name] for name in self.roles if hasattr(arguments.get(name), "shape")]
        before = [(x, numbers(x)) for x in arrays if not any(x is y for y in roles.values())]
        first = [name for name, kind in self.kinds.items() if kind is inspect.Parameter.POSITIONAL_ONLY]
        by_place = [arguments.pop(x) for x in first if x in arguments]
        with time_limit(self.name):
            result = self.function(*by_place, **arguments)
        if not all(np.array_equal(numbers(x), y) for x, y in before):
            self.happened.add("inputs-changed")
        if self.last and not np.array_equal(numbers(self.last[0]), self.last[1], equal_nan=True):
            self.happened.add("output-reused")
        if is_backward and not np.array_equal(numbers(roles["dO"]), numbers(self.array(self.turned(case.dO)))):
            self.happened.add("inputs-changed")
        if result is None:  # it writes its outputs into arguments
            result = [roles[x] for x in ("O", "L") if x in roles]
            for x, memory in [(x, x._base if self.library == "torch" else x.base) for x in result]:
                ends = slice(guard(int(np.prod(x.shape)))), slice(-guard(int(np.prod(x.shape))), None)
                if any((memory[end] != FENCE).any() for end in ends):
                    self.happened.add("writes-past-end")
        got = list(result) if isinstance(result, (tuple, list)) else [result]
        self.last = (got[0], numbers(got[0])) if got else None
        if is_backward:
            self.gives_O = len(got) > 3
            return {"O": got[0] if self.gives_O else O} | dict(zip(GRADIENTS, got[-3:] * gradients, strict=False))
        if len(got) == 2 and np.shape(got[1]) == np.shape(tensors[0]) != np.shape(got[0]):  # L came first
            got = got[::-1]
        has_L = len(got) == 2 or self.takes("lse")
        got = got[:1] + [x for x in got[1:2] if has_L and hasattr(x, "ndim")]
        is_taped = is_taped and getattr(got[0], "requires_grad", False)
        return dict(zip("OL", got, strict=False)) | (self.backward(got, tensors, case) if is_taped else {})

    def backward(self, got: list, tensors: list, case: AttentionCase) -> dict[str, Any]:
        """Return {"dQ", "dK", "dV"} from torch's autograd, given the function's outputs `got` and its inputs `tensors`.

        A gradient that autograd does not compute is omitted. The result is empty if the case has a dL but L does not
        require a gradient.
        """
        import torch

        ones = got[0].new_ones(()).expand(got[0].shape)  # as O.sum().backward() makes it
        gradients = [ones if (case.dO == 1).all() else self.array(self.turned(case.dO)).to(got[0].dtype)]
        if case.dL is not None:
            if len(got) < 2 or not got[1].requires_grad:
                return {}
            orders = (case.dL[0], case.dL[0].swapaxes(0, 1))
            of_L = next(x for x in orders if x.squeeze().shape == tuple(got[1].squeeze().shape))
            gradients.append(torch.tensor(of_L.reshape(got[1].shape)).to(got[1]))
        before = gradients[0].clone()
        run: Any = torch.autograd.Variable._execution_engine.run_backward  # grad() would leave the mode of fenced()
        some = tuple(got[: len(gradients)]), tuple(gradients), False, False, tuple(tensors)
        found = run(*some, allow_unreachable=True, accumulate_grad=False)
        if not torch.equal(before, gradients[0]):
            self.happened.add("inputs-changed")
        return {name: x for name, x in zip(GRADIENTS, found, strict=True) if x is not None}

    def hold(self, x: np.ndarray) -> np.ndarray:
        """Return x rounded to the function's dtype, as a float64 array."""
        return rounded(x, BITS[self.dtype]) if self.dtype == "bfloat16" else x.astype(self.dtype).astype(np.float64)

    def flat(self, x: np.ndarray, dtype: str = "") -> Any:
        if self.library == "torch":
            import torch

            return torch.tensor(x, dtype=getattr(torch, dtype or self.dtype), device=self.device)
        array = np.array(x, dtype=dtype or self.dtype)
        return import_module("jax.numpy").asarray(array) if self.library == "jax" else array

    def array(self, x: np.ndarray, place: str = "", fill: float = np.nan) -> Any:
        """Return x as an array of the function's library, surrounded in memory by guard elements with the value `fill`.

        If `place` is not empty, the array is a view, and `place` is the kind of view: "turned", "swapped", "gapped" or
        "expanded".
        """
        if self.library == "jax":
            return self.flat(x)
        a, b = {"turned": (-1, -2), "swapped": (0, 1)}.get(place, (0, 0))
        shape = list(x.shape)
        shape[-2:] = [shape[-2] + 3, shape[-1]] if place == "gapped" else shape[-2:]
        shape[a], shape[b] = shape[b], shape[a]
        size = int(np.prod(shape))
        memory, before = self.flat(np.full(size + 2 * guard(size), fill)), guard(size)
        view = memory[before : before + size].reshape(shape).swapaxes(a, b)
        view = view[..., : x.shape[-2], :] if place == "gapped" else view
        view[...] = self.flat(x)
        if place != "expanded":
            return view
        view[1:] = 7  # a function that ignores the stride of 0 reads these instead
        return import_module(self.library).broadcast_to(view[:1], x.shape)

    def option(self, x: Any) -> Any:
        """Convert the value x of an option to a Python number or an array of the function's library, and return it."""
        if not isinstance(x, np.ndarray):
            return x.item() if isinstance(x, np.generic) else x
        return self.flat(x, {"i": "int32", "b": "bool"}.get(x.dtype.kind, ""))


@contextmanager
def fenced(library: str, unset: float | None) -> Iterator[list]:
    """Append guard elements to every tensor that torch allocates inside the `with` block, and yield the list of guards.

    If `unset` is not None, also fill tensors created by torch.empty with this value. If `library` is not torch, the
    list stays empty.
    """
    ends: list = []
    if library != "torch":
        yield ends
        return
    import torch
    from torch.overrides import TorchFunctionMode

    class Fenced(TorchFunctionMode):
        def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: Any = None) -> Any:
            made, name = function(*args, **(kwargs or {})), getattr(function, "__name__", "")
            is_memory = name in MAKERS and type(made) is torch.Tensor and made.device.type != "meta"
            if not is_memory or not made.is_floating_point() or not made.is_contiguous():
                return made
            memory = torch.full((made.numel() + guard(made.numel()),), FENCE, dtype=made.dtype, device=made.device)
            ends.append(memory[made.numel() :])
            copy = made.new_empty(0).set_(memory.untyped_storage(), 0, made.shape)
            copy.copy_(made) if "empty" not in name or unset is None else copy.fill_(unset)
            return copy.requires_grad_(made.requires_grad)

    with Fenced():
        yield ends


def guard(size: int) -> int:
    """Return the number of guard elements before and after an array, which a function that confuses heads may read."""
    return (1 << 14) + 2 * size


def numbers(x: Any) -> np.ndarray:
    """Return an array from any library as a float64 NumPy array."""
    return np.array(x.detach().double().cpu().numpy() if hasattr(x, "detach") else x, dtype=np.float64)


def signature(function: Callable) -> inspect.Signature:
    """Return a function's signature. For a built-in function without one, read it from the start of its docstring."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        found = re.search(r"\w+\((.*?)\)\s*->", function.__doc__ or "q(q, k, v) ->", re.DOTALL)
        names = re.findall(r"(\w+)(?:\s*:[^,=]*)?(=)?[^,]*", found.group(1)) if found else []
        kind, none = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
        return inspect.Signature([inspect.Parameter(x, kind, default=None if given else none) for x, given in names])


@contextmanager
def time_limit(name: str) -> Iterator[None]:
    """Raise Endless if the `with` block, a call of the function `name`, takes longer than LIMIT seconds.

    The limit works only in the main thread of a Unix process.
    """

    def stop(*_: object) -> None:
        raise Endless(f"one call of {name} did not return within {LIMIT} seconds")

    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "SIGALRM"):
        yield
        return
    begun, before = time.monotonic(), signal.signal(signal.SIGALRM, stop)
    left = signal.alarm(LIMIT)  # seconds until an alarm that the caller has set
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.alarm(max(1, left - int(time.monotonic() - begun)) if left else 0)


def dtypes(library: str) -> tuple[str, ...]:
    return ("float64", "float32") if library == "numpy" else ("float32", "float16", "bfloat16")
