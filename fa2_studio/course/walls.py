"""Walls that a process may build around itself on Linux without being root and without namespaces.

Landlock: what it may read and write, and that its signals and TCP stay inside. A filter of system calls: no sockets but
local ones, no memory that is nobody's, no looking into other processes.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sys
from pathlib import Path

READ, LIST, ALL = 0b0101, 0b1000, 0x1FFF  # of files and programs, of folders; everything that the first version knows
SINCE = {2: 1 << 13, 3: 1 << 14, 5: 1 << 15}  # what later versions of Landlock control, too
SYSTEM = ("/usr", "/lib", "/lib32", "/lib64", "/bin", "/sbin", "/etc", "/proc", "/sys", "/dev")
DEVICES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random")


def landlock(home: str, needed: list[str], hidden: list[str]) -> dict[str, bool]:
    """Only the home can be written, only what Python needs can be read. The walls that this kernel made of it."""
    try:
        version = call(444, None, 0, 1)
        handled = ALL | sum(bits for since, bits in SINCE.items() if version >= since)
        words = [handled, 3 if version >= 4 else 0, 3 if version >= 6 else 0]
        rules = (ctypes.c_uint64 * 3)(*words)
        ruleset = call(444, ctypes.byref(rules), 8 * (1 + (version >= 4) + (version >= 6)), 0)
        out = [Path(p).resolve() for p in hidden]
        for folder in {Path(p).resolve() for p in (*needed, *SYSTEM)}:
            for place, rights in around(folder, [h for h in out if h != folder and h.is_relative_to(folder)]):
                allow(ruleset, place, rights)
        for device in DEVICES:
            allow(ruleset, Path(device), READ | 0b10)
        allow(ruleset, Path(home), handled)
        call(446, ruleset, 0)
        os.close(ruleset)
    except (OSError, AttributeError) as refusal:
        return {"refused": str(refusal)[:200]}
    return {"files": True, "signals": version >= 6}


def around(folder: Path, hidden: list[Path]):
    """(place, rights) so that a folder can be read but for what is hidden in it."""
    if not any(h.is_relative_to(folder) for h in hidden):
        yield folder, READ | LIST
    elif folder not in hidden:
        yield folder, LIST
        for inner in folder.iterdir():
            yield from around(inner, hidden)


def allow(ruleset: int, place: Path, rights: int) -> None:
    """Rights on a file, or on a folder and all below it."""
    try:
        number = os.open(place, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        rights &= ~LIST & 0x4007 if not place.is_dir() else ~0
        call(445, ruleset, 1, struct.pack("=Qi", rights, number), 0)
    finally:
        os.close(number)


# System calls -----------------------------------------------------------------------------------------------------

NUMBERS = {  # of x86_64 and of aarch64
    "memfd_create": (319, 279), "shmget": (29, 194), "msgget": (68, 186), "ptrace": (101, 117),
    "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "bpf": (321, 280), "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425), "perf_event_open": (298, 241), "add_key": (248, 217), "keyctl": (250, 219),
    "pidfd_getfd": (438, 438),
}  # fmt: skip
SOCKET, LIMIT = (41, 198), (302, 261)
MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
LOCAL = 1  # the family of sockets that do not leave the machine


def filtered(alone: bool) -> bool:
    """Refuse some system calls from now on; without namespaces sockets and other processes' limits as well."""
    if sys.platform != "linux" or platform.machine() not in MACHINES:
        return False
    column, machine = MACHINES[platform.machine()]
    refuse = 0x00050000 | errno.EPERM
    jump, load, end = 0x15, 0x20, 0x06
    code = [(load, 0, 0, 4), (jump, 1, 0, machine), (end, 0, 0, refuse), (load, 0, 0, 0)]
    code += [(0x35, 0, 1, 0x40000000), (end, 0, 0, refuse)]  # numbers of another interface
    for numbers in NUMBERS.values():
        code += [(jump, 0, 1, numbers[column]), (end, 0, 0, refuse)]
    for numbers, only in [] if alone else ((SOCKET, LOCAL), (LIMIT, 0)):  # by their first argument
        code += [(jump, 0, 4, numbers[column]), (load, 0, 0, 16), (jump, 1, 0, only), (end, 0, 0, refuse)]
        code += [(end, 0, 0, 0x7FFF0000)]
    code += [(end, 0, 0, 0x7FFF0000)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in code))
    try:
        call(157 if column == 0 else 167, 22, 2, struct.pack("@HP", len(code), ctypes.addressof(program)), 0, 0)
    except OSError:
        return False
    return True


def call(number: int, *arguments) -> int:
    """A system call's result, or an OSError."""
    library = ctypes.CDLL(None, use_errno=True)
    found = library.syscall(number, *(ctypes.c_size_t(a) if isinstance(a, int) else a for a in arguments))
    if found < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return found
