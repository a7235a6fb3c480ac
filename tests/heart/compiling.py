"""What the processes that compile without a GPU share."""

import re


class Compiling:
    """Stands in for a kernel: called in the same way, it compiles and keeps what came out."""

    def __init__(self, kernel):
        self.kernel, self.made = kernel, None

    def __getitem__(self, grid):
        def call(*arguments, **options):
            self.made = self.kernel.warmup(*arguments, grid=grid, **options)

        return call


def idle_barriers(ttgir: str) -> list[str]:
    """Barriers that are made for nobody: no part of the kernel takes them along, so others may get their memory."""
    taken = set(re.search(r"ttg\.warp_specialize\((.*?)\)", ttgir)[1].split(", "))
    whole = dict(re.findall(r"(%\w+) = ttg\.memdesc_index (%\w+)\[", ttgir))
    made = re.findall(r"ttng\.init_barrier (%\w+),", ttgir)
    return [name for name in made if name not in taken and whole.get(name) not in taken]
