"""The seccomp filter for a student's process: the system calls that the kernel refuses in every kind of sandbox.

The process installs the filter itself, before it runs any of the student's code. The filter refuses sockets, key rings,
queues, shared segments, locks and file watches, because one notebook could use them to send data to another. It also
refuses new namespaces, access to the memory of other processes, and other cores.
"""

import ctypes
import errno
import platform
import struct

DENIED = {  # {system call: (its number on x86-64, its number on ARM)}, with −1 for a call that does not exist
    "socket": (41, 198), "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "shmget": (29, 194),
    "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180), "flock": (73, 32), "inotify_init": (253, -1),
    "inotify_init1": (294, 26), "fanotify_init": (300, 262), "unshare": (272, 97), "setns": (308, 268),
    "mount": (165, 40), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438), "bpf": (321, 280), "perf_event_open": (298, 241), "io_uring_setup": (425, 425),
    "userfaultfd": (323, 282), "sched_setaffinity": (203, 122), "open_by_handle_at": (304, 265),
}  # fmt: skip
CLONE3, CLONE, FCNTL = (435, 435), (56, 220), (72, 25)
NAMESPACES = 0x7E020000  # the flags of clone that make new namespaces
LOCKS = (5, 6, 7, 36, 37, 38, 1024)  # the fcntl commands that query, acquire or release a lock or a lease
# {machine: (column in DENIED, the kernel's number for the architecture, number of the system call seccomp)}
MACHINES = {"x86_64": (0, 0xC000003E, 317), "aarch64": (1, 0xC00000B7, 277)}
LOAD, EQUAL, LEAST, ANY, END = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, REFUSE, UNKNOWN, KILL = 0x7FFF0000, 0x50000 | errno.EPERM, 0x50000 | errno.ENOSYS, 0x80000000


def program(column: int, machine: int) -> bytes:
    """Return the filter as a BPF program, in which each test is followed by the action for the calls that match it."""

    def when(test: int, value: int, then: int) -> list[tuple]:
        return [(test, 0, 1, value), (END, 0, 0, then)]

    lines = [(LOAD, 0, 0, 4), (EQUAL, 1, 0, machine), (END, 0, 0, KILL), (LOAD, 0, 0, 0)]
    lines += when(LEAST, 0x40000000, REFUSE)  # the x32 numbers, a second set for the same calls on x86-64
    for numbers in DENIED.values():
        lines += when(EQUAL, numbers[column], REFUSE) if numbers[column] >= 0 else []
    # A filter cannot read clone3's flags; if refused, C libraries call clone.
    lines += when(EQUAL, CLONE3[column], UNKNOWN)
    lines += [(EQUAL, 0, 4, CLONE[column]), (LOAD, 0, 0, 16), *when(ANY, NAMESPACES, REFUSE), (END, 0, 0, ALLOW)]
    locks = [line for command in LOCKS for line in when(EQUAL, command, REFUSE)]
    lines += [(EQUAL, 0, len(locks) + 1, FCNTL[column]), (LOAD, 0, 0, 24), *locks, (END, 0, 0, ALLOW)]
    return b"".join(struct.pack("HBBI", *line) for line in lines)


def install_filter() -> bool:
    """Install the filter for this process and all processes that it starts. Return False if that is impossible."""
    if platform.system() != "Linux" or platform.machine() not in MACHINES:
        return False
    column, machine, number = MACHINES[platform.machine()]
    text = program(column, machine)
    lines = ctypes.create_string_buffer(text)
    rules = ctypes.create_string_buffer(struct.pack("HP", len(text) // 8, ctypes.addressof(lines)))
    library = ctypes.CDLL(name=None, use_errno=True)
    no_new_rights = library.prctl(38, 1, 0, 0, 0)
    # The arguments 1, 1 stand for SECCOMP_SET_MODE_FILTER and for all threads.
    return no_new_rights == 0 and library.syscall(number, 1, 1, rules) == 0
