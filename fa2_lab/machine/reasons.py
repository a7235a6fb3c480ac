"""Why each rung of the ladder is there: what limited the one before, what the change removes, what it should give."""

from functools import cache
from typing import NamedTuple

from fa2_lab.kernels import ladder
from fa2_lab.machine import ladder as model
from fa2_lab.records import Measurement, Record, recorded

UNKNOWN = "The model counts instructions and programs on an SM. It knows no wait of one product for another."


class Reason(NamedTuple):
    """One change: in a few words for the table, and as a hypothesis that a measurement can refute."""

    cause: str  # what it is about
    limit: str  # what limited the rung before
    removes: str  # what the change takes away, or adds
    why: str
    missed: str = UNKNOWN  # what the prediction leaves out; shown where it misses by more than a tenth
    modelled: bool = True  # predicted by fa2_lab.machine.ladder; if not, only a limit follows from the counters


NOTHING = Reason("", "", "", "Nothing comes before this rung: it is where the climb begins.")
REASONS = {
    "01": Reason(
        "HBM bytes",
        "HBM: S and P go there and back",
        "S and P in HBM; adds O, ℓ and m at every tile",
        "FA1's loops keep S and P on the chip. But with one program a head, most SMs have no work in a small batch,"
        " and in this shape O in fp32 moves more bytes than S and P did. So the model expects a loss.",
        "The model sends rung 01 to L2 and rung 00 to HBM at full speed; both in truth wait longer.",
    ),
    "02": Reason(
        "HBM bytes",
        "HBM: O, ℓ and m at every tile",
        "O, ℓ and m in HBM until a row block is done",
        "With the loop over row blocks outside, o, ℓ and m stay in registers, and only K and V travel.",
        "In the model all bytes come from L2. Here K and V of all heads do not fit there, so both rungs wait for "
        "HBM, and rung 01, which moves more, waits longer.",
    ),
    "03": Reason(
        "idle SMs",
        "SMs without work: a program a head",
        "idle SMs; HBM reads of K and V",
        "Every row block gets a program. All SMs have work, a second program on each computes while the first one "
        "waits, and the row blocks of a head read the same K and V at the same time.",
        "The model counts SMs and the second program. It does not know that rung 02 reads K and V from HBM, and "
        "rung 03 finds them in L2. With 8 heads they fit there in both, and the model should be right.",
    ),
    "04": Reason(
        "instructions",
        "latency: two programs on an SM",
        "β, the second rescaling of a tile",
        "p is computed against the new maximum, so P V needs no factor of its own. But o is still divided in every "
        "tile, so P V still needs an accumulator beside o: the registers stay, and so does the number of programs.",
    ),
    "05": Reason(
        "programs on an SM",
        "latency: two programs on an SM",
        "the division, and a second accumulator",
        "With neither β nor a division in the loop, the tensor cores add P V where o lies. That frees the registers"
        " of a second accumulator. If a third program fits by it, it computes while the others wait.",
    ),
    "06": Reason(
        "instructions, a third program",
        "instructions; under the mask: programs",
        "the guard for denormals, two products",
        "exp becomes exp2: the guard for very small results goes, and the products by log₂e and by the scale become"
        " part of one multiply-add. Under the mask the registers fall to what lets a third program in.",
    ),
    "07": Reason(
        "tiles",
        "tiles that no row sees",
        "half of the tiles, under the causal mask",
        "The loop ends at the diagonal. Without a mask there is nothing to skip.",
    ),
    "08": Reason(
        "instructions",
        "instructions: the mask in every tile",
        "the mask's test; adds a second loop",
        "Only tiles on the diagonal need the test. The second loop is a second copy of the code, and may cost "
        "registers: if a program goes by it, the change loses.",
    ),
    "09": Reason(
        "instructions",
        "instructions: a test for every load",
        "the test where every key is real",
        "In the loop without a mask all keys are real, so its loads need no condition.",
    ),
    "10": Reason(
        "waits for data",
        "data: a tile is fetched when needed",
        "the way through registers, and its wait",
        "With num_stages=3 the copies of two tiles are under way while a third is computed, straight into shared "
        "memory. The price is room for three tiles.",
        "The model lets one product run into the next. In this order of the two loops the compiler makes each "
        "product wait for the one before: the next rung.",
    ),
    "11": Reason(
        "waits for products",
        "waits: each product for the one before",
        "all of these waits but one",
        "The two loops change places. Now no product of the long loop is still under way when the masked loop "
        "begins, and the compiler need not wait after each. The model counts instructions and not these waits.",
        "The waits that go are not in the model.",
    ),
    "12": Reason(
        "the last wave",
        "the end: heavy row blocks run last",
        "the tail, under the causal mask",
        "The row blocks with most tiles start first, those of all heads together, so that light ones fill the end.",
        "The model does not know HBM, and this order asks for the keys of all heads at the same time.",
    ),
    "13": Reason(
        "HBM bytes",
        "HBM: too many heads at the same time",
        "HBM reads of K and V",
        "Heads run in groups whose K and V fit in L2. The model does not know HBM, and predicts nothing.",
        "The model does not know HBM.",
    ),
    "14": Reason(
        "instructions",
        "instructions: addresses",
        "the arithmetic of addresses",
        "The copy engine moves whole tiles, of K and V and of O: one thread asks, and no thread computes addresses.",
        "The model does not know what else a bulk copy changes: the layout in which a tile lands, and who waits for"
        " it.",
    ),
    "15": Reason(
        "language",
        "nothing new: a change of language",
        "the compiler's choice; p in pairs",
        "The same tiles, stages and copies, written in Gluon: what Triton's compiler decided now stands in the "
        "code. One instruction rounds two numbers of p.",
        "The model counts instructions. Where they stand in the loop, it does not know.",
    ),
    "16": Reason(
        "instructions",
        "instructions: who computes also copies",
        "copies and their waits in the loop",
        "A warp of its own starts all copies. The warps that compute only wait for a barrier.",
        "The model counts the instructions of who computes. It does not know how long they wait at barriers.",
    ),
    "17": Reason(
        "L2 bytes",
        "perhaps the bytes from L2",
        "half of the bytes from L2",
        "More rows share each tile of K and V. If the bytes from L2 are the limit, this gains. The model says that "
        "copies run ahead far enough, and that nothing is gained.",
        "The model does not know the bytes from L2.",
    ),
    "18": Reason(
        "waits",
        "what each tile costs once",
        "half of the waits, maxima and barriers",
        "A tile of 128 keys pays once what two of 64 keys pay twice. Each byte from L2 stays.",
        "How much of its wait a tile pays once is fitted, and to other rungs.",
    ),
    "19": Reason(
        "instructions",
        "instructions: the mask in every tile",
        "the mask's test, without a mask",
        "The tile that may be masked comes first, before the loop.",
        "The model counts the instructions of the loop. It does not know in which order the assembler puts them, "
        "nor what the first tile costs by itself.",
    ),
    "20": Reason(
        "idle tensor cores",
        "tensor cores stand still in the softmax",
        "that pause: two products in flight",
        "Q Kᵀ of the next tile and P V of this one run while the softmax is computed. At best the tensor cores "
        "never stop.",
        modelled=False,
    ),
    "21": Reason(
        "idle tensor cores",
        "start and end of every row block",
        "most of that; takes a stage",
        "A program takes row block after row block. The next Q comes, and O leaves, while the tensor cores work. "
        "The room for both is the third stage's.",
        modelled=False,
    ),
    "22": Reason(
        "instructions",
        "instructions: rows are combined",
        "rescaling of o, and talk between lanes",
        "m seldom moves by much. While it does not, o is not rescaled, and the threads of a row exchange nothing.",
        modelled=False,
    ),
    "23": Reason(
        "power",
        "power: the clock falls",
        "a third of the bytes from L2",
        "192 rows share a tile. The tensor cores already work most of the time, so cycles can hardly fall. Bytes "
        "that do not move are watts for the clock.",
        modelled=False,
    ),
}


def reason(rung: str) -> Reason:
    """Why a rung is there."""
    return REASONS.get(ladder.find(rung)[1:3], NOTHING)


# Predicted and measured -----------------------------------------------------------------------------------------

SHAPES = tuple((causal, d) for d in (128, 64) for causal in (False, True))
N, TOKENS, HIDDEN = 4096, 16384, 2048  # of the shape in which the table is
TENSOR = "tensor cores at work, %"
MISS = 0.1


class Step(NamedTuple):
    """One change in one shape: how many times faster it should be and was."""

    predicted: float | None
    measured: float | None
    at_most: bool = False  # the prediction is only a limit

    @property
    def misses(self) -> bool:
        """Whether the prediction is wrong by more than a tenth."""
        if self.predicted is None or self.measured is None:
            return False
        if self.at_most:
            return self.measured > (1 + MISS) * self.predicted
        return abs(self.measured / self.predicted - 1) > MISS

    @property
    def prediction(self) -> str:
        """As a table shows it."""
        return f"{'≤ ' * (self.at_most and self.predicted is not None)}{times(self.predicted)}"


def times(factor: float | None) -> str:
    """A factor as a table shows it."""
    return "-" if factor is None else f"{factor:.2f}"


def step(record: Record, before: str, after: str, causal: bool = False, d: int = 128) -> Step:
    """The change from one rung to another in the shape that fills the GPU."""
    row = timed(record, causal, d)
    measured = row.ratio(after, before) if row and {before, after} <= row.values.keys() else None
    if reason(after).modelled:
        return Step(predicted(before, after, causal, d), measured)
    return Step(None if causal else most(record, before, d), measured, at_most=True)


def timed(record: Record, causal: bool, d: int) -> Measurement | None:
    """The forward pass of 16,384 tokens in sequences of 4,096."""
    for row in record.rows:
        p = row.problem
        shape = (p["N_q"], p["batch"] * N, p["heads"] * p["d"], p["d"], p["causal"])
        if row.direction == "forward" and shape == (N, TOKENS, HIDDEN, d, causal):
            return row
    return None


def predicted(before: str, after: str, causal: bool, d: int, heads: int | None = None) -> float | None:
    """What the model says of a change; None where a rung's compiled numbers are not recorded."""
    old, new = (modelled(name, causal, d) for name in (before, after))
    if old is None or new is None:
        return None
    return model.speedup(old, new, heads or TOKENS // N * HIDDEN // d, N, causal)


def most(record: Record, before: str, d: int) -> float | None:
    """What a change can gain at most, if the tensor cores then never stop: by the counter of the rung before."""
    for row in record.rows:
        p = row.problem
        if row.direction == "counters" and (p["rung"], p["d"], p["causal"]) == (before, d, False):
            return 100 / row.values[TENSOR][0] if TENSOR in row.values else None
    return None


# What was compiled and counted ----------------------------------------------------------------------------------

COMPILED = ("registers", "programs", "spills", "shared", "instructions", "exponentials", "waits")


@cache
def facts() -> dict[tuple[str, bool, int], dict]:
    """What the compiler made of each rung: {(rung, causal, d): its numbers}.

    Each has the numbers of COMPILED, keys and consumers. registers: of a thread that multiplies. programs: on an SM at
    the same time. instructions, exponentials, waits and keys: of the loop without a mask, for one tile.
    """
    rows = (recorded("rungs") or {}).get("rungs", [])
    return {(row["rung"], row["causal"], row["d"]): row for row in rows}


def modelled(name: str, causal: bool, d: int) -> model.Rung | None:
    """What the model knows of a rung; None where it is not recorded."""
    if name == ladder.RUNGS[0]:
        return model.Rung(0, programs=1, instructions=0, exponentials=0, d=d)  # three kernels, which HBM limits
    row = facts().get((name, causal, d))
    if row is None:
        return None
    numbers = (row[x] for x in ("programs", "instructions", "exponentials", "d", "keys", "consumers"))
    return model.Rung(int(name[1:3]), *numbers)


def counters(record: Record, name: str) -> dict[str, float]:
    """What the hardware counted of a rung without a mask."""
    rows = [row for row in record.rows if row.direction == "counters" and row.problem["rung"] == name]
    rows = [row for row in rows if not row.problem["causal"]]
    return {what: x[0] for what, x in max(rows, key=lambda row: row.problem["d"]).values.items()} if rows else {}


def chip(record: Record, name: str) -> tuple[float, ...]:
    """The SM clock in GHz and power in watts while a rung runs again and again without a pause, and no mask.

    Where that was not measured, the clock alone: counted cycles over time.
    """
    for row in record.sustained:
        if name in row.chip and (row.problem["d"], row.problem["causal"]) == (128, False):
            clock, watts = row.chip[name]
            return clock / 1e3, watts
    main, cycles = timed(record, causal=False, d=128), counters(record, name).get("SM cycles")
    return (cycles / main.values[name][0] / 1e6,) if main and cycles and name in main.values else ()
