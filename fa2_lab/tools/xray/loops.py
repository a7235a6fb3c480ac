"""Find the loops with matmuls in a kernel's machine code and count their instructions per score."""

import re
from typing import NamedTuple

INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;")
LABEL = re.compile(r"^\s*(\.L_x_\d+):")
BRANCH = re.compile(r"^@\S+ .*\bBRA\b.*`\((\.L_x_\d+)\)")  # only conditional branches; all others return from waits
PRODUCTS = (  # (matmul instruction, number of warps that execute it together: four on Hopper)
    (re.compile(r"\bHGMMA\.(\d+)x(\d+)x(\d+)"), 4),
    (re.compile(r"\bHMMA\.(16)(8)(16|8)\b"), 1),
)


class Loop(NamedTuple):
    """Counts per iteration of one loop: instructions, multiplications per warp, copies, exponentials, and waits."""

    instructions: int
    multiplications: float
    copies: int
    exponentials: int = 0
    waits: int = 0  # waits for the tensor cores

    def per_score(self, d: int) -> float:
        """Return the number of thread instructions per score."""
        return 32 * self.instructions / self.scores(d)

    def scores(self, d: int) -> float:
        """Return the number of scores that a warp computes per iteration. Each score requires 2 d multiplications."""
        return self.multiplications / (2 * d)


def loops(sass: str) -> list[Loop]:
    """Return all loops that contain a matmul, in program order."""
    code: list[str] = []
    labels: dict[str, int] = {}
    found: list[Loop] = []
    for line in sass.splitlines():
        if label := LABEL.match(line):
            labels[label[1]] = len(code)
        elif instruction := INSTRUCTION.match(line):
            code.append(instruction[1])
            back = BRANCH.search(instruction[1])
            if back and back[1] in labels:
                body = code[labels[back[1]] :]
                products = sum(multiplications(text) for text in body)
                copies = sum("LDGSTS" in text or "UTMALDG" in text for text in body)
                exponentials, waits = (sum(name in text for text in body) for name in ("MUFU.EX2", "WARPGROUP.DEPBAR"))
                if products:
                    found.append(Loop(len(body), products, copies, exponentials, waits))
    return found


def multiplications(instruction: str) -> float:
    """Return the number of multiplications that an instruction performs per warp, or 0 if it is not a matmul."""
    for pattern, warps in PRODUCTS:
        if sizes := pattern.search(instruction):
            rows, columns, inner = map(int, sizes.groups())
            return rows * columns * inner / warps
    return 0.0
