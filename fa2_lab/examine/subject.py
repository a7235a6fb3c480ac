"""A function to be examined, and how to call it: its library, its dtype, its layout, and what its arguments mean."""

from __future__ import annotations

import inspect
import re
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from copy import copy
from dataclasses import replace
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import numpy as np

from fa2_lab.examine.arguments import Arguments, NotExamined
from fa2_lab.examine.attention import attention
from fa2_lab.examine.cases import BITS, AttentionCase, paged, rounded
from fa2_lab.examine.guards import FENCE, fenced, guard, time_limit
from fa2_lab.examine.layouts import OF_OUTPUT, L_from_layout, axes, from_layout, to_layout
from fa2_lab.examine.match import GRADIENTS, RIGHT, TILES, Answer, Variant

LIBRARIES = ["numpy", *filter(find_spec, ("torch", "jax"))]
NO_TIME = "there was no time left for them"
NO_GPU = " Triton found no GPU. To interpret its kernels, import fa2_lab.kernels before triton."


class Subject:
    """The function under examination, and the library, dtype and layout with which it is called."""

    def __init__(self, function: Callable, given: dict[str, Any] | None = None, device: str = "") -> None:
        self.function, self.given, self.device = function, given or {}, device
        self.name = getattr(function, "__name__", type(function).__name__)
        self.arguments = Arguments(self.name, function, self.given)
        self.library, self.dtype, self.layout, self.multiple, self.d = "numpy", "float64", "bhnd", 1, 16
        self.layout_of_O = ""  # the layout of O, if it is not that of q
        self.also = ""  # a layout with which the output is correct, if it is wrong with self.layout
        self.place: tuple[str, ...] | str = ""  # memory layout of the inputs: one for all, or one for each
        self.fill = np.nan  # the value in memory before and after each input
        self.unset: float | None = None  # value that fills the results of torch.empty
        self.before_call: Callable[[AttentionCase], object] = lambda case: None  # called before each case
        self.no_gradients = ""  # why the function has no gradients, or "" if it has them
        self.no_groups = False  # whether the function writes past its outputs if heads share keys
        self.gives_O = True  # False for a backward function that returns no O
        self.gives_dict = self.gives_several = False  # whether the function returns a dictionary, or any collection
        self.happened: set[str] = set()  # mistakes noticed during a call
        self.last: tuple[Any, np.ndarray] | None = None  # what the last call returned, and a copy of its values
        self.until = np.inf  # the time of time.monotonic() after which the function is not called
        self.eps = 0.0  # spacing of numbers near 1, if it is larger than the dtype's
        function = getattr(function, "func", getattr(function, "forward", function))  # of a functools.partial or module
        function = inspect.unwrap(function)
        self.code, self.space = getattr(function, "__code__", None), getattr(function, "__globals__", {})

    def like(self, **how: Any) -> Subject:
        """Return a copy of this Subject with the attributes in `how`, such as dtype, replaced."""
        other = copy(self)
        vars(other).update(how)
        return other

    def takes(self, role: str) -> bool:
        return self.arguments.takes(role)

    def has_kernels(self, *kinds: str) -> bool:
        """Return whether the function's module contains Triton kernels of these kinds."""
        return any(type(x).__name__ in kinds for x in self.space.values())

    def calls_kernels(self) -> bool:
        """Return whether the function uses a Triton kernel, directly or through functions and classes of its module."""
        kinds = ("InterpretedFunction", "JITFunction", "Autotuner", "Heuristics")
        return any(type(x).__name__ in kinds for x in self.reached())

    def is_right(self, answer: Answer, variant: Variant = RIGHT) -> bool:
        """Return whether O is as in the variant, or the gradients, if the function returns only gradients."""
        own = ("O",) if self.gives_O else GRADIENTS
        return all(x in answer.outputs for x in own) and answer.fits(variant, own)

    def counts_keys(self) -> bool:
        """Return whether the function's source reads how many keys there are, as if it might not be N_q."""
        n = axes(self.layout).find("n")
        names = "|".join(x for role in "kv" for x in self.arguments.named(role))
        axis = rf"({n}|{n - len(axes(self.layout))})"
        pattern = rf"\b({names})\.(shape\b(?!\[)|shape\[{axis}\]|size\({axis}?\))"
        pattern += rf"|len\(({names})\)" if n == 0 else ""
        found = []
        for code in [x for x in self.reached() if self.code and getattr(x, "co_filename", "") == self.code.co_filename]:
            with suppress(OSError):
                found.append(re.search(pattern, inspect.getsource(code), re.IGNORECASE))
        return any(found)

    def reached(self) -> Iterator:
        """Yield the code of the function, and of all functions, classes and kernels of its module that it calls."""
        inside: list = [self.code]
        seen: set = set()
        while inside:
            x = inside.pop()
            x = getattr(x, "__func__", x)
            yield x
            inside += vars(x).values() if isinstance(x, type) and x.__module__ == self.space.get("__name__") else ()
            if hasattr(x, "__code__"):
                inside.append(x.__code__)
            if hasattr(x, "co_names") and x not in seen:
                seen.add(x)
                inside += [*x.co_consts, *(self.space[name] for name in x.co_names if name in self.space)]

    def tiles(self) -> tuple[int, ...]:
        """Return tile sizes that the function may use: the usual ones, and the numbers found in its module."""
        module, numbers = self.space.get("__name__"), [*self.arguments.defaults.values(), *self.given.values()]
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
        """Return the case in a form that the function accepts, after the changes that Arguments.fitted() makes.

        With the layout thd, only the first batch entry is kept, and with the layout bhd, only the last query.
        """
        case = self.arguments.fitted(case)
        if "n" not in axes(self.layout):
            last = {x: getattr(case, x)[:, :, -1:] for x in ("q", "dO", "dL") if getattr(case, x) is not None}
            case = replace(case, **last)
        return case.part(slice(1)) if self.layout == "thd" else case

    def lacks(self, case: AttentionCase) -> str:
        """Return an option or a property of the case that the function does not support, or "" if there is none."""
        if self.no_groups and case.k.shape[1] != case.q.shape[1]:
            return "grouped heads"
        k = np.repeat(case.k, case.q.shape[1] // case.k.shape[1], axis=1)
        if self.dtype == "float16" and case.made != (1.0, 0.0) and np.abs(case.q @ k.swapaxes(2, 3)).max() > 6e4:
            return "products of Q and K beyond float16"
        return self.arguments.lacks(case, self.layout)

    def ask(self, case: AttentionCase, gradients: bool = True) -> Answer:
        """Call the function on a case, and return its Answer, with the gradients if `gradients` is set.

        Raise NotExamined if the call fails, if its result is not an array of the right shape, or if it is too late.
        """
        if time.monotonic() > self.until:
            raise NotExamined(NO_TIME)
        self.before_call(case)
        case = case.rounded(self.hold) if self.dtype != "float64" else case
        gradients = gradients and case.gradients and not self.takes("pages")
        found_in: dict[str, list] = {}
        is_past, parts = False, self.parts(case)
        for part in [x for entry in parts for x in entry]:
            k, v = (paged(x)[0] if self.takes("pages") else x for x in (part.k, part.v))
            inputs = [to_layout(x, self.layout) for x in (part.q, k, v)]
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
            layouts = [self.layout_of_O] if self.layout_of_O else [self.layout, *OF_OUTPUT]
            of_O = next((x for x in layouts if from_layout(found["O"], x, part.dO.shape) is not None), "")
            if not of_O:
                raise NotExamined(f"it returns shape {found['O'].shape} for q of shape {inputs[0].shape}")
            self.layout_of_O = of_O
            like = {"O": part.dO, "dQ": part.q, "dK": part.k, "dV": part.v}
            for name, x in found.items():
                if name == "L":
                    whole = L_from_layout(x, self.layout, part.q.shape[:3])
                else:
                    whole = from_layout(x, of_O if name == "O" else self.layout, like[name].shape)
                found_in.setdefault(name, []).append(whole)
            if not all(np.array_equal(numbers(a), b, equal_nan=True) for a, b in zip(tensors, inputs, strict=True)):
                self.happened.add("inputs-changed")
        heads = len(parts[0])  # the number of calls for each batch entry
        outputs = {
            name: np.concatenate([np.concatenate(x[i : i + heads], axis=1) for i in range(0, len(x), heads)])
            for name, x in found_in.items()
            if not any(y is None for y in x)
        }
        answer = Answer(case, outputs, max(2.0 ** -BITS[self.dtype], self.eps))
        is_grouped = case.q.shape[1] != case.k.shape[1]
        if is_past and is_grouped and not self.is_right(answer):
            self.no_groups = True
            raise NotExamined("it does not compute grouped heads, and writes past the end of its outputs instead")
        if is_past and (self.gives_O or case.q.shape[2] == case.k.shape[2] or self.counts_keys()):
            self.happened.add("writes-past-end")
        return answer

    def parts(self, case: AttentionCase) -> list[list[AttentionCase]]:
        """Split a case into one case for each separate call: a list for each batch entry, or a single one for all.

        If the layout has no axis for the batch, or if the function takes one length for all batch entries, each batch
        entry needs its own call. If the layout has no axis for the heads, each head needs its own call.
        """
        is_apart = ("b" not in axes(self.layout) and self.layout != "thd") or self.arguments.lengths_are_int
        entries = [case.part(slice(b, b + 1)) for b in range(case.q.shape[0])] if is_apart else [case]
        heads = [slice(h, h + 1) for h in range(case.q.shape[1])] if "h" not in axes(self.layout) else [slice(None)]
        return [[x.part(heads=h) for h in heads] for x in entries]

    def call(self, tensors: list, case: AttentionCase, gradients: bool) -> dict[str, Any]:
        """Call the function once, and return its outputs as {"O": …, "L": …, "dQ": …, "dK": …, "dV": …}.

        L is omitted if the function does not return it, and the gradients if `gradients` is not set. The gradients are
        those that the function returns, or those that torch's autograd computes.
        """
        is_taped = gradients and self.library == "torch" and not self.takes("dO")
        for x in tensors if is_taped else ():
            x.requires_grad_()
        arrays = self.arrays(tensors, case)
        written = [arrays[x] for x in ("O", "L") if x in arrays]
        arguments = self.given | {x: self.option(y) for x, y in self.arguments.values(case, self.layout).items()}
        arguments |= {name: arrays[role] for name, role in self.arguments.roles.items() if role in arrays}
        kept = [x for x in arguments.values() if hasattr(x, "shape") and not any(x is y for y in (*tensors, *written))]
        before = [numbers(x) for x in kept]
        by_place = [arguments.pop(x) for x in self.arguments.by_place if x in arguments]
        with time_limit(self.name):
            result = self.function(*by_place, **arguments)
        if not all(np.array_equal(numbers(x), y, equal_nan=True) for x, y in zip(kept, before, strict=True)):
            self.happened.add("inputs-changed")
        if self.last and not np.array_equal(numbers(self.last[0]), self.last[1], equal_nan=True):
            self.happened.add("output-reused")
        if result is None:  # the function writes its outputs into arguments
            result = written
            for x, memory in [(x, x._base if self.library == "torch" else x.base) for x in written]:
                ends = slice(guard(int(np.prod(x.shape)))), slice(-guard(int(np.prod(x.shape))), None)
                if any((memory[end] != FENCE).any() for end in ends):
                    self.happened.add("writes-past-end")
        self.gives_dict, self.gives_several = isinstance(result, Mapping), isinstance(result, (tuple, list, Mapping))
        got: list = list(result.values() if self.gives_dict else result) if self.gives_several else [result]
        self.last = (got[0], numbers(got[0])) if got else None
        if self.takes("dO"):
            self.gives_O = len(got) > 3
            O = got[0] if self.gives_O else to_layout(attention(case)["O"], self.layout)
            return {"O": O} | dict(zip(GRADIENTS, got[-3:] * gradients, strict=False))
        shapes = [np.broadcast_to(0.0, np.shape(x)) for x in got]
        if [L_from_layout(x, self.layout, case.q.shape[:3]) is None for x in shapes] == [False, True]:  # L came first
            got = got[::-1]
        has_L = len(got) == 2 or self.takes("lse")
        got = got[:1] + [x for x in got[1:2] if has_L and hasattr(x, "ndim")]
        is_taped = is_taped and getattr(got[0], "requires_grad", False)
        return dict(zip("OL", got, strict=False)) | (self.backward(got, tensors, case) if is_taped else {})

    def arrays(self, tensors: list, case: AttentionCase) -> dict[str, Any]:
        """Return {role: array} for q, k and v, and for the gradient and the outputs that are arguments of the function.

        If the function takes dO, it gets the correct O, L and D. Otherwise, O and L are arrays for it to write into.
        """
        arrays = dict(zip("qkv", tensors, strict=True))
        axis = -4 if self.layout in ("bhnd", "hnd") else -3
        arrays |= self.cached(arrays, case) if self.takes("new_k") else {}
        stack = self.module().stack
        arrays |= {name: stack(x, axis) for name, x in (("qkv", tensors), ("kv", tensors[1:])) if self.takes(name)}
        exact = "float32" if BITS[self.dtype] < 16 else self.dtype  # the dtype of L and D
        O, L = np.full(tensors[0].shape, np.nan), np.full(tensors[0].shape[:-1], np.nan)
        if self.takes("dO"):
            right, one = attention(case), (0,) * (4 - len(axes(self.layout)))
            O, L, D = to_layout(right["O"], self.layout), right["L"][one], (case.dO * right["O"]).sum(axis=3)[one]
            arrays |= {"dO": self.array(to_layout(case.dO, self.layout)), "D": self.array(D, dtype=exact)}
        arrays |= {"O": self.array(O, fill=FENCE)} if self.takes("O") else {}
        return arrays | ({"L": self.array(L, fill=FENCE, dtype=exact)} if self.takes("L") else {})

    def cached(self, arrays: dict[str, Any], case: AttentionCase) -> dict[str, Any]:
        """Return {role: array} for a cache, and for the queries' own keys and values, which it lacks."""
        N_q, ends = case.q.shape[2], {*case.options.get("key_lengths", [case.k.shape[2]])}
        if len(ends) > 1:
            raise NotExamined("new keys beside caches of several lengths")
        axis, end = axes(self.layout).index("n"), int(ends.pop())
        made: dict[str, Any] = {}
        for name in "kv":
            old, new = (arrays[name][(slice(None),) * axis + (x,)] for x in (slice(end - N_q), slice(end - N_q, end)))
            rest = 0 * arrays[name][(slice(None),) * axis + (slice(end - N_q, None),)] + 7
            made |= {name: self.module().concatenate([old, rest], axis), f"new_{name}": new}
        return made

    def backward(self, got: list, tensors: list, case: AttentionCase) -> dict[str, Any]:
        """Return {"dQ", "dK", "dV"} from torch's autograd, given the function's outputs `got` and its inputs `tensors`.

        A gradient that autograd does not compute is omitted. The result is empty if the case has a dL but L does not
        require a gradient.
        """
        import torch

        of_O = self.layout_of_O or self.layout
        ones = got[0].new_ones(()).expand(got[0].shape)  # expanded from one element, as by O.sum().backward()
        gradients = [ones if (case.dO == 1).all() else self.array(to_layout(case.dO, of_O)).to(got[0].dtype)]
        if case.dL is not None:
            if len(got) < 2 or not got[1].requires_grad:
                return {}
            orders = [case.dL.transpose(x) for x in ((0, 1, 2), (0, 2, 1), (1, 2, 0))]
            of_L = next(x for x in orders if x.squeeze().shape == tuple(got[1].squeeze().shape))
            gradients.append(torch.tensor(of_L.reshape(got[1].shape)).to(got[1]))
        before = gradients[0].clone()
        found = torch.autograd.grad(got[: len(gradients)], tensors, gradients, allow_unused=True)
        if not torch.equal(before, gradients[0]):
            self.happened.add("inputs-changed")
        return {name: x for name, x in zip(GRADIENTS, found, strict=True) if x is not None}

    def hold(self, x: np.ndarray) -> np.ndarray:
        """Return x rounded to the function's dtype, as a float64 array."""
        return rounded(x, BITS[self.dtype]) if self.dtype == "bfloat16" else x.astype(self.dtype).astype(np.float64)

    def module(self) -> Any:
        """Return the module with the array functions of the function's library."""
        return import_module("jax.numpy" if self.library == "jax" else self.library)

    def flat(self, x: np.ndarray, dtype: str = "") -> Any:
        if self.library == "torch":
            import torch

            return torch.tensor(x, dtype=getattr(torch, dtype or self.dtype), device=self.device)
        array = np.array(x, dtype=dtype or self.dtype)
        return self.module().asarray(array)

    def array(self, x: np.ndarray, place: str = "", fill: float = np.nan, dtype: str = "") -> Any:
        """Return x as an array of the function's library, surrounded in memory by guard elements with the value `fill`.

        If `place` is not empty, the array is a view, and `place` is the kind of view: "turned", "swapped", "gapped" or
        "expanded".
        """
        if self.library == "jax":
            return self.flat(x, dtype)
        a, b = {"turned": (-1, -2), "swapped": (0, 1)}.get(place, (0, 0))
        shape = list(x.shape)
        shape[-2:] = [shape[-2] + 3, shape[-1]] if place == "gapped" else shape[-2:]
        shape[a], shape[b] = shape[b], shape[a]
        size = int(np.prod(shape))
        memory, before = self.flat(np.full(size + 2 * guard(size), fill), dtype), guard(size)
        view = memory[before : before + size].reshape(shape).swapaxes(a, b)
        view = view[..., : x.shape[-2], :] if place == "gapped" else view
        view[...] = self.flat(x, dtype)
        if place != "expanded":
            return view
        view[1:] = 7  # a function that ignores the stride of 0 reads these instead
        return self.module().broadcast_to(view[:1], x.shape)

    def option(self, x: Any) -> Any:
        """Convert the value x of an option to a Python number or an array of the function's library, and return it."""
        if not isinstance(x, np.ndarray):
            return x.item() if isinstance(x, np.generic) else x
        return self.flat(x, {"i": "int32", "b": "bool"}.get(x.dtype.kind, ""))


def numbers(x: Any) -> np.ndarray:
    """Return an array from any library as a float64 NumPy array."""
    return np.array(x.detach().double().cpu().numpy() if hasattr(x, "detach") else x, dtype=np.float64)


def dtypes(library: str) -> tuple[str, ...]:
    return ("float64", "float32") if library == "numpy" else ("float32", "float16", "bfloat16")
