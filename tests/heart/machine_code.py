"""Disassemble many NVIDIA binaries with one run of nvdisasm, because its start takes longer than one kernel."""

import re
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from fa2_lab.tools import offline

INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/.*\n", re.MULTILINE)
BYTES = 16  # the size of an instruction, since Volta


def sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the content of each section of a 64-bit ELF file."""
    (at,), (size, number, named) = struct.unpack_from("<Q", elf, 40), struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<II16xQQ", elf, at + n * size) for n in range(number)]
    names = headers[named][2]
    for name, _, start, length in headers:
        yield elf[names + name : elf.index(b"\0", names + name)].decode(), elf[start : start + length]


def code_of(cubin: bytes) -> bytes:
    """Return the instructions of a binary with one kernel."""
    return b"".join(content for name, content in sections(cubin) if name.startswith(".text."))


def read(cubins: dict[bytes, int]) -> dict[bytes, tuple[str, str]]:
    """Return {binary: (resource usage, machine code)} for {binary: compute capability}.

    The values are those of offline.read, without labels and source lines.
    """
    found, chips = {}, defaultdict(list)
    for cubin, capability in cubins.items():
        chips[f"SM{capability}{'a' * (capability >= 90)}"].append(cubin)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "code"
        for chip, some in chips.items():
            codes = [code_of(cubin) for cubin in some]
            file.write_bytes(b"".join(codes))
            lines = INSTRUCTION.finditer(offline.nvidia_tool("nvdisasm", "--binary", chip, str(file)))
            texts = [line[0] for line in lines]
            assert len(texts) == sum(map(len, codes)) // BYTES, "not every instruction has a line"
            for cubin, code in zip(some, codes, strict=True):
                file.write_bytes(cubin)
                count = len(code) // BYTES
                found[cubin] = offline.nvidia_tool("cuobjdump", "-res-usage", str(file)), "".join(texts[:count])
                del texts[:count]
    return found
