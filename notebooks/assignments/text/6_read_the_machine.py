# %% [markdown]
# # Assignment 6 · Read the machine
#
# **Which block size is best on this chip, and why?** You can predict most of the answer before you measure anything.
# For that, you need to know how many thread blocks there are and how many run at once, how many bytes move between HBM
# and the chip, and what fits on the chip.
#
# | step | points |
# | --- | --- |
# | 1. `by_hand`: four numbers for an A100 | 2 |
# | 2. `waves`: how many waves, and how full | 2 |
# | 3. `traffic`: bytes moved | 3 |
# | 4. `fits`: shared memory and registers | 3 |
# | 5. `best_blocks`: the choice | 2 |
# | 6. `writers`: which programs add to dQ | 2 |
# | 7. `backward_traffic`: bytes moved by the backward pass | 2 |
# | 8. `passes`: one pass or two | 2 |
# | 9. `backward_fits`: shared memory and registers of the backward pass | 2 |
#
# *Time: 5 hours. Before this: chapters 05, 06 and 07, and appendix A. Hardware: any laptop; the GPUs are in a table.*
#
# **How it is graded.** Your functions are compared with the package's models, for more chips and shapes than you see
# here. You may use `fa2_lab.machine.chips`. The rest of `fa2_lab` is off limits, and above all its models (`io`,
# `grid`, `budget`).

# %% locked="setup"
from checks import predict as check
from fa2_lab.machine.chips import A100, CHIPS

# %% [markdown]
# ## 1. By hand
#
# Take FlashAttention-2's forward pass on an A100 (108 SMs) with the sizes in the cell below, at batch 1, with `heads`
# heads, `N` queries and keys, fp16, tiles of B_r × B_c and no mask. One thread block runs on each SM, and K and V are
# kept in two stages. Work out the four numbers with pencil and paper. `L` is fp32, all other numbers in HBM take 2
# bytes each, and a MiB is 1,024² bytes. If a number is wrong, the check only tells you whether it is too small or too
# large.

# %% locked="question"
heads, N, d, B_r, B_c = 32, 4096, 128, 128, 64

# %% solution="by_hand"
def by_hand():
    """Return {"thread blocks": …, "waves on an A100": …,
    "KiB of shared memory": …, "MiB moved": …}."""
    ### BEGIN SOLUTION
    return {
        "thread blocks": heads * N // B_r,
        "waves on an A100": -(-heads * N // B_r // 108),
        "KiB of shared memory": 2 * (B_r * d + 2 * 2 * B_c * d) / 1024,
        "MiB moved": heads * (2 * 2 * N * d + 4 * N + N // B_r * 2 * 2 * N * d) / 1024**2,
    }

# %% test="by_hand" points=2
report = check.by_hand(by_hand, seed=0)

# %% [markdown]
# ## 2. Waves
#
# Each thread block processes one row block of one head. An SM holds up to `resident` thread blocks at once, and all
# thread blocks take equally long. Return the number of waves, and the share of the slots in these waves that have work.
# `chip.SMs` is the number of SMs.

# %% solution="waves"
def waves(chip, heads, N_q, B_r, resident):
    """Return (waves, share of the slots that have work)."""
    ### BEGIN SOLUTION
    blocks, slots = heads * -(-N_q // B_r), chip.SMs * resident
    rounds = -(-blocks // slots)
    return rounds, blocks / (rounds * slots)

# %% test="waves" points=2
report = check.waves(waves)
report += check.waves(waves, [(CHIPS["L40S"], 7, 777, 64, 3), (CHIPS["H200"], 16, 16384, 128, 2)], seed=602)

# %% [markdown]
# ## 3. Traffic
#
# Return the bytes that FA2's forward pass moves between HBM and the chip for one head with N queries and N keys. An
# element of Q, K, V or O takes 2 bytes, and an element of L takes 4. With the causal mask, column blocks that a row
# block does not see are not loaded. The last blocks may be short.

# %% solution="traffic"
def traffic(N, d, B_r, B_c, causal):
    """Return the bytes moved for one head."""
    ### BEGIN SOLUTION
    once = 2 * N * d * 2 + 4 * N
    streamed = 0
    for row in range(0, N, B_r):
        sees = min(row + B_r, N) if causal else N
        streamed += min(-(-sees // B_c) * B_c, N)
    return once + 2 * streamed * d * 2

# %% test="traffic" points=3
report = check.traffic(traffic)
report += check.traffic(traffic, [(1000, 96, (64, 128), True), (777, 40, (128, 128), True), (129, 128, (64, 64), False)], seed=603)

# %% [markdown]
# ## 4. What fits
#
# This is the model for 16-bit inputs:
#
# - A block's shared memory holds Q_i once, and K_j and V_j once for each stage.
# - A thread needs 40 registers for addresses and the like, plus its share of the registers that o (in fp32), s (in
#   fp32) and p (in 16 bits) need together, rounded up. Two 16-bit numbers fit in a register, and a warp has 32 threads.
# - A block may use up to `chip.shared_per_block` bytes of shared memory. A thread may use at most 255 registers, and at
#   most its share of the SM's 65,536 registers, rounded down to a multiple of 8.
#
# Return the bytes, the registers, and whether both are within these limits.

# %% solution="fits"
def fits(chip, B_r, B_c, d, stages, warps):
    """Return (shared memory in bytes, registers of a thread, True if it fits)."""
    ### BEGIN SOLUTION
    shared = 2 * (B_r * d + stages * 2 * B_c * d)
    threads = 32 * warps
    registers = 40 + -(-(B_r * d + B_r * B_c + B_r * B_c // 2) // threads)
    most = min(255, 65536 // threads // 8 * 8)
    return shared, registers, shared <= chip.shared_per_block and registers <= most

# %% test="fits" points=3
report = check.fits(fits)
report += check.fits(fits, [(CHIPS["H100 SXM"], (128, 128), 176), (CHIPS["GeForce RTX 3090"], (64, 128), 128)])

# %% [markdown]
# ## 5. The choice
#
# B_r and B_c are each 64 or 128, there are two stages, and a block has 4 or 8 warps. Of the pairs that fit, return the
# pair that moves the fewest bytes. If several pairs tie, return the pair with the largest B_c. **Predict** before you
# run: does B_c change the traffic?

# %% solution="best_blocks"
def best_blocks(chip, N, d, causal):
    """Return (B_r, B_c)."""
    ### BEGIN SOLUTION
    sizes = [(r, c) for r in (64, 128) for c in (64, 128)]
    good = [b for b in sizes if any(fits(chip, *b, d, 2, w)[2] for w in (4, 8))]
    return min(good, key=lambda b: (traffic(N, d, *b, causal), -b[1]))

# %% test="best_blocks" points=2 given="traffic fits"
report = check.best_blocks(best_blocks)
report += check.best_blocks(best_blocks, [(CHIPS["L40S"], 1024, 128, True), (CHIPS["H200"], 2048, 256, False), (A100, 8192, 256, True)], seed=604)

# %% [markdown]
# ## 6. The backward pass: which programs add to dQ
#
# FA2's backward pass has one program for each column block. The program keeps dK_j and dV_j on chip and visits the row
# blocks that see its keys. At each visit, it adds its part to dQ_i in HBM. For each row block, return the number of
# programs that add to it. The last blocks may be short, and there are N queries and N keys. **Predict:** with the
# causal mask, which row block has the most?

# %% solution="writers"
def writers(N, B_r, B_c, causal):
    """Return [the number of programs that add to dQ_i, for each row block i]."""
    ### BEGIN SOLUTION
    sees = [min(row + B_r, N) if causal else N for row in range(0, N, B_r)]
    return [-(-keys // B_c) for keys in sees]

# %% test="writers" points=2
report = check.writers(writers)
report += check.writers(writers, [(129, (64, 64), True), (1000, (64, 128), True), (640, (128, 128), False)], seed=605)

# %% [markdown]
# ## 7. What one pass moves
#
# FA2's Algorithm 2 moves the following bytes for one head:
#
# - First, it computes D = rowsum(dO ∘ O), for which O and dO are loaded once, and D is stored once.
# - dQ is stored once as zeros.
# - K_j and V_j are loaded once, and dK_j and dV_j are stored once.
# - For each visited tile, Q_i, dO_i, L_i, D_i and dQ_i are loaded, and dQ_i is stored.
#
# L, D and dQ are fp32 and take 4 bytes per number, and all other tensors take 2. A tile that no row sees is not
# visited.

# %% solution="backward_traffic"
def backward_traffic(N, d, B_r, B_c, causal):
    """Return the bytes moved for one head, in one pass."""
    ### BEGIN SOLUTION
    rows = 0  # rows brought on chip, summed over all visited tiles
    for i, count in enumerate(writers(N, B_r, B_c, causal)):
        rows += count * (min(N, (i + 1) * B_r) - i * B_r)
    start = 2 * 2 * N * d + 4 * N + 4 * N * d
    columns = 4 * 2 * N * d
    return start + columns + rows * (2 * 2 * d + 2 * 4 + 2 * 4 * d)

# %% test="backward_traffic" points=2 given="writers"
report = check.backward_traffic(backward_traffic)
report += check.backward_traffic(backward_traffic, [(777, 40, (128, 128), True), (129, 128, (64, 64), True)], seed=606)

# %% [markdown]
# ## 8. One pass or two
#
# Additions in HBM happen in any order, so the last bits of dQ change from run to run. The alternative is two passes.
# The first pass is Algorithm 2 without dQ, so it does not clear, load or store dQ. The second pass has one program for
# each row block, like the forward pass. It loads Q_i, dO_i, L_i and D_i once, loads K and V for each column block that
# the rows see, and stores dQ_i once, with 2 bytes per element.
#
# Return the bytes that two passes move, and the number of passes (1 or 2) that moves fewer bytes (1 if both move the
# same number). Two passes also compute S and dP twice, so bytes are not the whole cost.

# %% solution="passes"
def passes(N, d, B_r, B_c, causal):
    """Return (bytes of two passes, 1 or 2)."""
    ### BEGIN SOLUTION
    one = backward_traffic(N, d, B_r, B_c, causal)
    sees = writers(N, B_r, B_c, causal)
    rows = sum(count * (min(N, (i + 1) * B_r) - i * B_r) for i, count in enumerate(sees))
    keys = sum(min(count * B_c, N) for count in sees)
    columns = one - 4 * N * d - rows * 2 * 4 * d
    two = columns + 3 * 2 * N * d + 2 * 4 * N + keys * 2 * 2 * d
    return two, 1 if one <= two else 2

# %% test="passes" points=2 given="writers backward_traffic"
report = check.passes(passes)
report += check.passes(passes, [(777, 40, (128, 128), True), (128, 64, (128, 128), False), (64, 32, (64, 64), True)], seed=607)

# %% [markdown]
# ## 9. What fits in the backward pass
#
# For 16-bit inputs, this is the model of a program of the first pass, which keeps a column block:
#
# - Shared memory holds K_j and V_j once, and for each stage Q_i, dO_i, and L_i and D_i in fp32.
# - A thread needs 40 registers, plus its share of the registers that dk, dv, p and dp (in fp32) and one B_r × B_c
#   operand (in 16 bits) need together, rounded up.
# - The limits are the same as in step 4.

# %% solution="backward_fits"
def backward_fits(chip, B_r, B_c, d, stages, warps):
    """Return (shared memory in bytes, registers of a thread, True if it fits)."""
    ### BEGIN SOLUTION
    shared = 2 * 2 * B_c * d + stages * (2 * 2 * B_r * d + 2 * 4 * B_r)
    threads = 32 * warps
    registers = 40 + -(-(2 * B_c * d + 2 * B_r * B_c + B_r * B_c // 2) // threads)
    most = min(255, 65536 // threads // 8 * 8)
    return shared, registers, shared <= chip.shared_per_block and registers <= most

# %% test="backward_fits" points=2
report = check.backward_fits(backward_fits)
report += check.backward_fits(backward_fits, [(CHIPS["L40S"], (64, 64), 96), (CHIPS["GeForce RTX 3090"], (128, 64), 64)])
