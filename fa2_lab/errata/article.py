"""Mistakes in the article that errata.SOURCES lists as "article on FA2"."""

from collections.abc import Callable
from types import ModuleType

import numpy as np

from fa2_lab.errata.cases import Small, distance
from fa2_lab.errata.erratum import Erratum
from fa2_lab.reference import fa1, fa2
from fa2_lab.tiles import CAUSAL, Tile, Tiling
from fa2_lab.trace import Trace

CASE = Small(N=8, d=4)
MASKED = Small(N=8, d=4, causal=True)
B = 16  # the tile height, tile width and head dimension used for counting traffic


# HBM traffic --------------------------------------------------------------------------------------------------


def metered(algorithm: ModuleType, N: int) -> int:
    """Return the number of elements that `algorithm` moves between HBM and the chip, according to the meter."""
    case, meter = Small(N, B), Trace()
    algorithm.forward(case.Q, case.K, case.V, B_r=B, B_c=B, trace=meter)
    return meter.hbm_elements


def fa2_traffic(N: int) -> int:
    """Return the HBM traffic of FA2's Algorithm 1 in elements.

    Q, O and L are moved once, and K and V are loaded once for each of the N / B row blocks.
    """
    return 2 * N * B + N + (N // B) * 2 * N * B


def fa1_traffic(N: int) -> int:
    """Return the HBM traffic of FA1's Algorithm 2 in elements.

    The algorithm initializes O, l and m once, and also loads K and V once. For each column block, it loads Q, O, l and
    m, and it stores O, l and m.
    """
    return (N * B + 2 * N) + 2 * N * B + (N // B) * (3 * N * B + 4 * N)


TRAFFIC = Erratum(
    id="article-traffic",
    source="article on FA2, recap of FlashAttention-1",
    claim="FlashAttention's memory traffic is O(N).",
    why="K and V are read once for each of the N / B row blocks, so doubling N nearly quadruples the metered traffic.",
    instead="The extra memory is O(N), but the traffic is Θ(N² d² / M).",
    met="Dao-AILab/flash-attention #1260, #1705",
    wrong=lambda: 2.0,  # the claimed growth of the traffic if N doubles
    right=lambda: fa2_traffic(256) / fa2_traffic(128),
    error=lambda growth: abs(growth - metered(fa2, 256) / metered(fa2, 128)),
    unit="in the factor",
)

SAME_IO = Erratum(
    id="article-same-io",
    source="article on FA2, putting the four together",
    claim="FA1 and FA2 have the same memory traffic.",
    why="In every inner step, FA1 loads Q, O, ℓ and m and stores O, ℓ and m again, whereas FA2 only streams K and V. "
    "Elsewhere, the article itself praises the better access pattern of the swapped loops.",
    instead="FA1's loop order moves about 3/2 times as many elements as FA2's, and the loops give the exact ratio.",
    met="Dao-AILab/flash-attention #335",
    wrong=lambda: 1.0,
    right=lambda: fa1_traffic(128) / fa2_traffic(128),
    error=lambda ratio: abs(ratio - metered(fa1, 128) / metered(fa2, 128)),
    unit="in the ratio",
)


SNIPPET = Erratum(
    id="article-fa1-snippet",
    source="article on FA2, change 1",
    claim="The snippet named FA1 shows FA1's inner loop, with one row block against all key blocks and O and ℓ on "
    "chip.",
    why="The snippet is FA2's loop with an extra division. FA1 has the key blocks in its outer loop, first takes the "
    "maximum of each tile alone, and sends O, ℓ and m to HBM and back in every step.",
    instead="Algorithm 2 of the FA1 paper, whose traffic is what the meter counts, unlike the snippet's.",
    met="Dao-AILab/flash-attention #40, #766",
    wrong=lambda: fa2_traffic(128) - 128,  # the snippet's traffic, which is FA2's traffic without L
    right=lambda: fa1_traffic(128),
    error=lambda elements: abs(elements - metered(fa1, 128)),
    unit="elements",
)


# The savings from the first change ----------------------------------------------------------------------------


def full_scalings(stage: str, tiles: int) -> int:
    """Return the number of times that a loop over `tiles` tiles scales a B_r × d block by one factor per row.

    `stage` names the loop, "fa1" or "fa2".
    """
    count = 0

    def scaled(block: np.ndarray, factor: np.ndarray) -> np.ndarray:
        nonlocal count
        count += 1
        return block * factor

    m, l, o = np.full((8, 1), -np.inf), np.zeros((8, 1)), np.zeros((8, 4))
    for j in range(tiles):
        s, v = CASE.S[:, [j % 8]], CASE.V[[j % 8]]
        m_new = np.maximum(m, s)
        p, alpha = np.exp(s - m_new), np.exp(m - m_new)
        l_new = alpha * l + p
        if stage == "fa1":
            o = scaled(o, l * alpha / l_new) + scaled(p @ v, 1 / l_new)
        else:
            o = scaled(o, alpha) + p @ v
        m, l = m_new, l_new
    if stage == "fa2":
        o = scaled(o, 1 / l)
    return count


RESCALES = Erratum(
    id="article-rescales",
    source="article on FA2, change 1",
    claim="Over 64 key blocks, FA1's 64 rescales of the accumulator become a single one.",
    why="FA2 still multiplies O by e^(m_old − m_new) in every tile. It only drops the second scaling, the one of P̃ V.",
    instead="128 scalings of a B_r × d block become 65.",
    wrong=lambda: 1 / 64,  # fraction of the scalings that remains
    right=lambda: 65 / 128,
    error=lambda share: abs(share - full_scalings("fa2", 64) / full_scalings("fa1", 64)),
    unit="of the scalings",
)


EXP_COST = Erratum(
    id="article-exp-cost",
    source="article on FA2, why an IO-optimal kernel can still be slow",
    claim="An exp costs 16 times as much as a matmul FLOP.",
    why="16 = 312 / 19.5 compares tensor cores with FP32 FMAs. Exponentials have their own unit, with 16 results per "
    "clock and SM on A100 and H100, whose tensor cores do 2048 and 4096 dense FP16 FLOPs in that clock.",
    instead="An exp costs about 128 times as much on an A100, and 256 times as much on an H100.",
    met="Dao-AILab/flash-attention #1225; NVIDIA/cudnn-frontend #1178",
    wrong=lambda: 312 / 19.5,
    right=lambda: 2048 / 16,
    error=lambda times: abs(times - 312e12 / (108 * 1.41e9 * 16)),  # matmul FLOPs that take as long as one exponential
    unit="FLOPs",
    tolerance=0.1,
)


# The third change: warps --------------------------------------------------------------------------------------


def scores_of_warps(join: Callable) -> np.ndarray:
    """Return the scores that four warps compute for their own keys, combined by `join`."""
    return join([CASE.tau * CASE.Q @ K_w.T for K_w in np.split(CASE.K, 4)])


SPLIT_K = Erratum(
    id="article-split-K",
    source="article on FA2, change 3",
    claim="Split-K cuts the contraction dimension d of Q Kᵀ, so the warps' partial scores are summed before the "
    "softmax.",
    why="Here K means the keys. Each warp has finished scores for its own columns, so a sum would mix different keys.",
    instead="The slices of S are placed side by side. Warps exchange row maxima before the exponentials. After these, "
    "they exchange and sum row sums and the products P_w V_w.",
    met="Dao-AILab/flash-attention #1204",
    wrong=lambda: scores_of_warps(sum),
    right=lambda: scores_of_warps(np.hstack),
    error=lambda S: distance(S, CASE.S),
)


def warps_and_keys(split: str, warps: int = 4) -> list[set]:
    """Return a list with the set of K and V elements that each warp reads if the warps divide `split` ("Q" or "K")."""
    keys = np.split(np.arange(CASE.N), warps) if split == "K" else [np.arange(CASE.N)] * warps
    return [{(tensor, int(j), c) for tensor in "KV" for j in js for c in range(CASE.d)} for js in keys]


SMEM = Erratum(
    id="article-smem",
    source="article on FA2, change 3",
    claim="With split-Q, every warp needs the whole K/V block, so shared memory fills up and tiles must shrink.",
    why="With either split, the block is stored once for all warps. With split-Q, each warp reads all of it into "
    "registers.",
    instead="Shared memory holds the same 2 B_c d elements, but the reads from it are multiplied by the number of "
    "warps.",
    wrong=lambda: sum(len(elements) for elements in warps_and_keys("Q")),
    right=lambda: len(set().union(*warps_and_keys("K"))),
    error=lambda stored: abs(stored - len(set().union(*warps_and_keys("Q")))),
    unit="elements",
)

KIB_PER_SM, KIB_RESERVED_PER_BLOCK = 228, 1  # for an H100, from the CUDA programming guide (compute capability 9.0)

SMEM_LIMIT = Erratum(
    id="article-228",
    source="article on FA2, change 3",
    claim="An H100 thread block can use up to 228 KiB of shared memory.",
    why="An SM has 228 KiB, of which 1 KiB is reserved for each thread block that runs there.",
    instead="One thread block can use up to 227 KiB.",
    met="JuliaGPU/CUDA.jl #3135; marin-community/marin #3159",
    wrong=lambda: KIB_PER_SM,
    right=lambda: KIB_PER_SM - KIB_RESERVED_PER_BLOCK,
    error=lambda kib: abs(kib + KIB_RESERVED_PER_BLOCK - KIB_PER_SM),
    unit="KiB",
)


# The fourth change: the causal mask ---------------------------------------------------------------------------


SKIP_TEST = Erratum(
    id="article-skip",
    source="article on FA2, change 4",
    claim="Skip a tile if j · B_kv > (i + 1) · B_q, and mask it if it is on the diagonal.",
    why="(i + 1) · B_q is the first row after the block, so the tile that begins there is hidden as well. But this "
    "rule visits it (13 tiles of 16 instead of 10) and does not mask it, because it is not on the diagonal. So the "
    "future leaks.",
    instead="Skip if j · B_kv ≥ (i + 1) · B_q.",
    met="openvinotoolkit/openvino #35438",
    wrong=lambda: MASKED.computed("tile-past"),
    right=MASKED.computed,
    error=lambda O: distance(O, MASKED.O),
)


MASK_ZERO = Erratum(
    id="article-mask-zero",
    source="article on FA2, change 4",
    claim="Scores above the diagonal are masked to zero before the softmax.",
    why="Since exp(0) = 1, a score of zero counts like any other.",
    instead="They are set to −∞ before the softmax, so that their probabilities are zero.",
    met="georg-wolflein/good-features #1; awslabs/gluonts #1401; hyunwoongko/transformer #10",
    wrong=lambda: MASKED.computed("hidden-zero", B=8),
    right=MASKED.computed,
    error=lambda O: distance(O, MASKED.O),
)

OBLONG = Tiling(N_q=512, N_k=512, B_r=128, B_c=64, mask=CAUSAL)

ONE_DIAGONAL = Erratum(
    id="article-one-diagonal",
    source="article on FA2, change 4",
    claim="Each query block has one diagonal key block, N / B_q in total, even if B_q ≠ B_kv.",
    why="In a 128 × 64 tiling, the diagonal crosses two tiles of each query block, and masking one lets the other "
    "leak.",
    instead="If B_q is a multiple of B_kv, each query block has B_q / B_kv diagonal tiles, N / B_kv in total.",
    met="triton-lang/triton #8853; ROCm/rocMLIR #2165; Dao-AILab/flash-attention #436",
    wrong=lambda: OBLONG.N_q // OBLONG.B_r,
    right=lambda: OBLONG.N_q // OBLONG.B_c,
    error=lambda tiles: abs(tiles - OBLONG.counts()[Tile.DIAGONAL]),
    unit="tiles",
)

ERRATA = (
    *(TRAFFIC, SAME_IO, SNIPPET, RESCALES, EXP_COST),
    *(SPLIT_K, SMEM, SMEM_LIMIT, SKIP_TEST, MASK_ZERO, ONE_DIAGONAL),
)
