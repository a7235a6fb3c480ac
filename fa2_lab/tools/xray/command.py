"""`fa2-lab xray NAME`: compile a kernel for any chip, even an absent one, and print the result."""

import argparse

from fa2_lab.tools.xray.compile import CHIPS, OPTIONS, STAGES, Compiled, names, xray_launches


def main(argv: list[str]) -> int:
    arguments = parser().parse_args(argv)
    if arguments.name is None:
        print("\n".join(names()))
        return 0
    sizes = dict(d=arguments.d, N=arguments.N, causal=not arguments.full, dtype=arguments.dtype)
    launch = {option: getattr(arguments, option) for option in OPTIONS if getattr(arguments, option) is not None}
    (compiled,) = xray_launches(arguments.name, [launch], arguments.chip, **sizes)
    if not compiled:
        raise ValueError(f"name: got {arguments.name}; its forward launches no kernel of Triton's")
    stages = [stage for stage in STAGES if getattr(arguments, stage)]
    print(table(compiled))
    for kernel in compiled:
        for stage in stages:
            print(f"\n{kernel.name}, {stage}\n{kernel.stages.get(stage, f'{kernel.chip} has no {stage}').rstrip()}")
    return 0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command's arguments: a name, a chip, the sizes of a call, and the stages to print."""
    parser = argparse.ArgumentParser(
        prog="fa2-lab xray", description="Compile a kernel without a GPU, and show its registers and instructions."
    )
    parser.add_argument(
        "name", nargs="?", help="a rung (07), a kernel of the package, or your file.py (default: list the names)"
    )
    chips = ", ".join(f"{chip} ({what})" for chip, what in CHIPS.items())
    parser.add_argument("--chip", default="sm_90", help=f"the chip to compile for, such as A100 or {chips}")
    parser.add_argument("--d", type=int, default=128, help="the head dimension (default: 128)")
    parser.add_argument("--N", type=int, default=4096, help="the sequence length (default: 4096)")
    dtypes = ["bfloat16", "float16", "float32"]
    parser.add_argument("--dtype", default="bfloat16", choices=dtypes, help="the dtype of q, k and v")
    parser.add_argument("--full", action="store_true", help="compile without the causal mask")
    for option in OPTIONS:
        parser.add_argument(f"--{option}", type=int, help=f"override the {option} of the call")
    for stage in STAGES:
        parser.add_argument(f"--{stage}", action="store_true", help=f"print the kernel in the form of {stage}")
    return parser


def table(compiled: list[Compiled]) -> str:
    """Return a table with one row per compiled kernel, followed by each kernel's layouts."""
    columns = list(compiled[0].numbers)
    lines = [f"{compiled[0].chip:20}" + "".join(f"{column:>13}" for column in columns)]
    for kernel in compiled:
        lines.append(f"{kernel.name:20}" + "".join(f"{kernel.numbers[column]:13,}" for column in columns))
    lines += [text for kernel in compiled if (text := kernel.misfit())]
    for kernel in compiled:
        lines += ["", f"{kernel.name}: layouts"]
        lines += [f"  {name:10} {layout}" for name, layout in kernel.layouts.items()]
    return "\n".join(lines)
