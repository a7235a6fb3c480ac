"""What the processes that compile without a GPU share."""


class Compiling:
    """Stands in for a kernel: called in the same way, it compiles and keeps what came out."""

    def __init__(self, kernel):
        self.kernel, self.made = kernel, None

    def __getitem__(self, grid):
        def call(*arguments, **options):
            self.made = self.kernel.warmup(*arguments, grid=grid, **options)

        return call
