"""The arguments of an examined function: what each of them means, which cases they can express, and their values.

The role of an argument, such as causal or key_lengths, is recognized by the argument's name. The last table of
catalogue.md lists the names of each role. detect.py finds out the form that the function expects, for example whether a
window is one number or two.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import replace
from fnmatch import fnmatchcase
from types import SimpleNamespace
from typing import Any

import numpy as np

from fa2_lab.examine.cases import OPEN, PAGE, AttentionCase, paged
from fa2_lab.examine.catalogue import ROLES
from fa2_lab.examine.layouts import axes

# Roles whose values are passed in every call, also if a case does not mention them
ALWAYS = {"causal", "heads", "kv_heads", "group", "lse", "longest", "grouped", "cu_seqlens", "cu_seqlens_k"}
OF_PAGES = {"pages", "page", "key_lengths"}  # roles that are also passed in every call if the function takes pages
GIVEN = {"q", "k", "v", "qkv", "kv", "new_k", "new_v", "dO", "O", "L", "D"}  # roles of arrays that Subject makes
LENGTHS = ("key_lengths", "padding", "start")  # roles that tell a function the lengths of the keys
NEEDED = inspect.Parameter.empty  # stands for the default of an argument that has none


class NotExamined(Exception):
    """Raised if the function cannot run a case. The message gives the reason."""


class Arguments:
    """The arguments of a function: their roles, their defaults, and the forms in which it expects their values."""

    def __init__(self, name: str, function: Callable, given: dict[str, Any]) -> None:
        function = getattr(function, "forward", function)  # for a torch.nn.Module
        parameters = [p for p in signature(function).parameters.values() if p.kind < 4 and p.kind != p.VAR_POSITIONAL]
        self.defaults = {p.name: p.default for p in parameters}
        self.by_place = [p.name for p in parameters if p.kind == p.POSITIONAL_ONLY]
        named = {x: role_of(x) for x in self.defaults if x not in given}
        if not {"qkv", "kv"} & set(named.values()) and not {"q", "k", "v"} <= set(named.values()):
            named |= dict(zip([x for x in named if named[x] in ("", *"qkv")], "qkv", strict=False))
        if "new_k" in named.values():  # if there are new keys, a length is that of the cache
            named = {x: "start" if role == "key_lengths" else role for x, role in named.items()}
        self.roles = {x: role for x, role in named.items() if role}
        self.always = ALWAYS | ({"start"} if self.takes("new_k") else set())
        if not (self.takes("qkv") or (self.takes("q") and self.takes("kv")) or all(map(self.takes, "qkv"))):
            raise NotExamined(f"{name} takes {len(named)} arguments; q, k and v are needed")
        for x in named:
            if not named[x] and self.defaults[x] is NEEDED:
                raise NotExamined(f"{name} needs {x!r}, which is not known here: give it with --set {x}=…")
        self.unused = [x for x in named if not named[x]]
        windows = [self.defaults[x] for x in self.named("window")]
        self.window_is_always = any(x is NEEDED or (type(x) is int and x > 0) for x in windows)
        self.window_is_int = self.window_is_always  # whether a window is one number
        self.window_is_left = False  # whether a window of one number has only a left side
        self.window_may_be_open = any(isinstance(x, tuple) and -1 in x for x in windows)
        self.lengths_are_int = False  # whether the lengths are a single number, so that each batch entry needs a call
        self.padding_keeps = False  # whether True in a padding mask marks a key that takes part
        self.mask_is_float = False  # whether masks contain 1 and 0 instead of True and False

    def named(self, role: str) -> list[str]:
        """Return the names of the arguments that have this role."""
        return [name for name, x in self.roles.items() if x == role]

    def takes(self, role: str) -> bool:
        return role in self.roles.values()

    def fitted(self, case: AttentionCase) -> AttentionCase:
        """Return the case with the function's default softcap, if the case has none of its own.

        If the function's window has only a left side, the right side of the case's window is opened.
        """
        cap = next((self.defaults[name] for name in self.named("softcap")), 0)
        options = dict(case.options)
        if type(cap) in (int, float) and cap > 0:
            options = dict(softcap=cap) | options
        if self.window_is_left and options.get("window", (OPEN,))[0] != OPEN and not options.get("causal"):
            options["window"] = (options["window"][0], OPEN)
        return replace(case, options=options)

    def lacks(self, case: AttentionCase, layout: str) -> str:
        """Return an option or a property of the case that the arguments cannot express, or "" if there is none."""
        names: dict[str, tuple[str, ...]] = dict(mask=("mask", "bias") if case.group.startswith("bias") else ("mask",))
        names["key_lengths"] = LENGTHS
        if lacks := [x for x in case.options if not any(map(self.takes, names.get(x, (x,))))]:
            return lacks[0]
        N_q, N_k = case.q.shape[2], case.k.shape[2]
        is_ungrouped = layout in ("nd", "bnd") or self.takes("qkv") or (layout == "flat" and not self.takes("kv_heads"))
        if case.k.shape[1] != case.q.shape[1] and is_ungrouped:
            return "grouped heads"
        of_keys = layout != "thd" or self.takes("cu_seqlens_k")
        if N_k != N_q and (self.takes("qkv") or not of_keys):
            return "other lengths of keys than of queries"
        if self.takes("start") and np.min(case.options.get("key_lengths", [N_k])) < N_q:
            return "fewer keys than queries"
        has_own_d = layout == "flat" or any(map(self.takes, ("qkv", "kv", "O", "dO", "pages")))
        if case.v.shape[3] != case.q.shape[3] and has_own_d:
            return "a head dimension of v of its own"
        if case.dL is not None and self.takes("dO"):
            return "the gradient of L"
        left, right = case.options.get("window") or (0, 0)
        if self.window_is_int and "window" in case.options:
            if left == 0:
                return "windows of the row's own key alone"
            return "windows with two sides" if left != right and not (self.window_is_left and right == OPEN) else ""
        return "windows with an open side" if OPEN in (left, right) and not self.window_may_be_open else ""

    def values(self, case: AttentionCase, layout: str) -> dict[str, Any]:
        """Return the options of a case as keyword arguments, with the function's names and in its forms.

        Arrays are NumPy arrays. The roles in GIVEN are not included.
        """
        (batch, heads, N_q, d), (kv_heads, N_k) = case.q.shape, case.k.shape[1:3]
        tau, group = d**-0.5, heads // kv_heads
        known: dict[str, Any] = dict(causal=False, lse=True, grouped=group > 1, page=PAGE, seed=0, scale=tau)
        known |= dict(heads=heads, kv_heads=kv_heads, group=group, window=(-1, -1), dropout=0.0)
        known |= dict(key_lengths=np.full(batch, N_k), sinks=np.full(heads, -np.inf), slopes=np.zeros(heads))
        known |= dict(cu_seqlens=np.array([0, N_q]), mask=np.ones((batch, heads, N_q, N_k), dtype=bool))
        known["cu_seqlens_k"] = case.options.get("cu_seqlens", np.array([0, N_k]))
        known["module"] = SimpleNamespace(num_key_value_groups=group, num_heads=heads, num_key_value_heads=kv_heads)
        is_training = "dropout" in case.options
        vars(known["module"]).update(head_dim=d, scaling=tau, training=is_training, is_causal=False, layer_idx=0)
        known["kept"] = known["mask"]
        known |= case.options
        passed = set(case.options) | self.always | (OF_PAGES if self.takes("pages") else set())
        if "key_lengths" in passed:
            passed |= set(LENGTHS)
        known["start"] = known["key_lengths"] - N_q
        known["padding"] = (np.arange(N_k) >= known["key_lengths"][:, None]) != self.padding_keeps
        is_one = {axis: slice(None) if axis in axes(layout) else 0 for axis in "bh"}
        known |= {name: known[name][is_one["b"], is_one["h"]] for name in ("mask", "kept")}
        known |= {name: known[name][is_one["h"]] for name in ("sinks", "slopes")}
        if layout == "nd" or self.lengths_are_int:
            known |= {name: known[name][0] for name in ("key_lengths", "start")}
        if self.takes("pages"):
            known["pages"] = paged(case.k)[1]
        if self.mask_is_float:
            known |= {x: known[x].astype(float) for x in ("mask", "padding")}
        if case.group.startswith("bias") and self.takes("bias"):
            known["bias"] = known.pop("mask")
            passed.add("bias")
        known["window"] = tuple(-1 if x == OPEN else x for x in known["window"])
        if self.window_is_always:
            passed.add("window")
            known |= {} if "window" in case.options else dict(window=(N_q + N_k,) * 2)
        if self.window_is_int:
            known["window"] = known["window"][0]
        of_q, of_k = (int(np.diff(known[name]).max()) for name in ("cu_seqlens", "cu_seqlens_k"))
        longest = {"_q": of_q, "_k": of_k, "kv": of_k}  # chosen by the end of the argument's name
        values: dict[str, Any] = {}
        for name, role in self.roles.items():
            if role in passed or (self.defaults[name] is NEEDED and role not in GIVEN):
                known["longest"] = longest.get(name[-2:].lower(), max(of_q, of_k))
                values[name] = known.get(role)
        return values


def role_of(name: str) -> str:
    """Return the role of an argument with this name, or "". Names that are listed without an asterisk come first."""
    name = name.lower()
    return ROLES.get(name) or next((role for pattern, role in ROLES.items() if fnmatchcase(name, pattern)), "")


def signature(function: Callable) -> inspect.Signature:
    """Return a function's signature. For a built-in function without one, read it from the start of its docstring."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        found = re.search(r"\w+\((.*?)\)\s*->", function.__doc__ or "q(q, k, v) ->", re.DOTALL)
        names = re.findall(r"(\w+)(?:\s*:[^,=]*)?(=)?[^,]*", found.group(1)) if found else []
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        return inspect.Signature([inspect.Parameter(x, kind, default=None if has else NEEDED) for x, has in names])
