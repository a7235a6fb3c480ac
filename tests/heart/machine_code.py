"""Disassemble many NVIDIA binaries with one run of nvdisasm, because its start takes longer than one kernel."""

import re
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

from fa2_lab.tools import offline

INSTRUCTION = re.compile(r"^\s*/\*([0-9a-f]{4,})\*/.*\n", re.MULTILINE)
INSTRUCTION_BYTES = 16  # the size of an instruction, since Volta


def sections(elf: bytes) -> Iterator[tuple[str, bytes]]:
    """Yield the name and the content of each section of a 64-bit ELF file."""
    (offset,), (size, number, names_section) = struct.unpack_from("<Q", elf, 40), struct.unpack_from("<HHH", elf, 58)
    headers = [struct.unpack_from("<II16xQQ", elf, offset + n * size) for n in range(number)]
    names = headers[names_section][2]
    for name, _, start, length in headers:
        yield elf[names + name : elf.index(b"\0", names + name)].decode(), elf[start : start + length]


def code_of(cubin: bytes) -> bytes:
    """Return the instructions of a binary with one kernel."""
    return b"".join(content for name, content in sections(cubin) if name.startswith(".text."))


def disassemble(cubins: dict[bytes, int]) -> dict[bytes, tuple[str, str]]:
    """Return {binary: (resource usage, machine code)} for {binary: compute capability}.

    The values are those of offline.read, without labels and source lines.
    """
    listings, chips = {}, defaultdict(list)
    for cubin, capability in cubins.items():
        chips[f"SM{capability}{'a' * (capability >= 90)}"].append(cubin)
    with TemporaryDirectory() as folder:
        file = Path(folder) / "code"
        for chip, binaries in chips.items():
            codes = [code_of(cubin) for cubin in binaries]
            file.write_bytes(b"".join(codes))
            lines = INSTRUCTION.finditer(offline.nvidia_tool("nvdisasm", "--binary", chip, str(file)))
            texts = [line[0] for line in lines]
            assert len(texts) == sum(map(len, codes)) // INSTRUCTION_BYTES, "not every instruction has a line"
            for cubin, code in zip(binaries, codes, strict=True):
                file.write_bytes(cubin)
                count = len(code) // INSTRUCTION_BYTES
                listings[cubin] = offline.nvidia_tool("cuobjdump", "-res-usage", str(file)), "".join(texts[:count])
                del texts[:count]
    return listings
