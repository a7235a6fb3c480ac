"""Find the machine instructions generated for each source line, using the line numbers in Triton's compiled code."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

from fa2_lab.paper import Place, where
from fa2_lab.tools import offline
from fa2_lab.tools.xray.compile import xray

MARK = re.compile(r'//## File "([^"]+)", line (\d+)( inlined at)?')
MAX_INSTRUCTIONS = 4  # machine instructions shown per line of code
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(.*?);?\s*(?:/\*.*)?$")


def by_line(cubin: bytes) -> dict[str, list[str]]:
    """Return {"file.py:line": instructions compiled from this line, in program order} for an NVIDIA binary.

    NVIDIA's assembler annotates only the first instruction of a Hopper matmul, so all of a matmul's instructions are
    assigned to the line of the WARPGROUP.ARRIVE that opens it.
    """
    found: dict = {}
    here, inlined, product = None, False, None
    for line in offline.read(cubin)[1].splitlines():
        if mark := MARK.search(line):
            if not inlined:  # the first annotation names the line itself, and later annotations name its callers
                here = f"{Path(mark[1]).name}:{mark[2]}"
            inlined = bool(mark[3])
        elif here and (instruction := INSTRUCTION.match(line)):
            words = " ".join(instruction[1].split())
            product = here if words == "WARPGROUP.ARRIVE" else product
            found.setdefault(product if words.startswith("HGMMA") else here, []).append(words)
    return found


def sass_of(tag: str, chip: str = "sm_90") -> str:
    """Return text that lists the machine instructions of the Triton lines that compute line `tag` of a paper."""
    line = where(tag)
    if not line.first_triton:
        raise ValueError(f"{line.tag} has no Triton line: {line.no_triton}")
    path = Path(line.first_triton[0].file)
    name = path.stem if path.parent.name == "ladder" else f"{path.parent.name}.{path.stem}"
    kernels = xray(name, chip)
    return "\n".join(part for place in line.first_triton for part in instructions(place, kernels))


def instructions(place: Place, kernels: Any) -> list[str]:
    """Return a summary of one line of code: the count of each machine instruction, and the first few instructions."""
    rows = [f"{place.file}:{place.number}  {place.text.split('  #')[0].strip()}"]
    for kernel in kernels:
        became = kernel.lines.get(f"{Path(place.file).name}:{place.number}", [])
        counts = Counter(re.sub(r"^@!?U?P\w+ ", "", text).split()[0] for text in became)
        if counts:
            rows.append(f"  {kernel.name}, {kernel.chip}, {len(became)} instructions: "
                        + ", ".join(f"{n} {name}" for name, n in counts.most_common()))  # fmt: skip
            rows += [f"    {text}" for text in became[:MAX_INSTRUCTIONS]]
            rows += [f"    … {len(became) - MAX_INSTRUCTIONS} more"] * (len(became) > MAX_INSTRUCTIONS)
    return rows if len(rows) > 1 else [*rows, "  no instruction of its own: the compiler put it into others"]
