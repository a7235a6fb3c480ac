"""Models of the machine: what attention moves, computes, holds and waits for, in numbers a reader can redo by hand.

io      HBM traffic and operation counts of standard attention, FA1 and FA2, in closed form
chips   what each GPU can do, every figure with its source
grid    thread blocks on SMs over time: waves, tail, who collides on dQ
warps   one thread block executed warp by warp, split-K and split-Q, with its shared memory counted
budget  shared memory and registers of a block size, and whether it fits
time    clocks of one tile on each unit of an SM
"""
