"""From a source line to its machine instructions: Triton writes line numbers into its code, nvdisasm reads them."""

from __future__ import annotations

import re
from pathlib import Path
from tempfile import NamedTemporaryFile

from fa2_lab.studio import offline

MARK = re.compile(r'//## File "([^"]+)", line (\d+)( inlined at)?')
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]+\*/\s+(.*?);?\s*(?:/\*.*)?$")


def by_line(cubin: bytes) -> dict[str, list[str]]:
    """{"file.py:line": its instructions, in the order of the program}, of a kernel compiled for an NVIDIA GPU."""
    with NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        text = offline.run("nvdisasm", "-g", "-c", file.name)
    found, here, inlined = {}, None, False
    for line in text.splitlines():
        if mark := MARK.search(line):
            if not inlined:  # the first mark is the line itself, those after it say from where it was called
                here = f"{Path(mark[1]).name}:{mark[2]}"
            inlined = bool(mark[3])
        elif here and (instruction := INSTRUCTION.match(line)):
            found.setdefault(here, []).append(" ".join(instruction[1].split()))
    return found
