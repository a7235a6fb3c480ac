"""The book's symbols and terms in English and Chinese, each with the chapter that explains it."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Term:
    """One symbol or word, with its meaning in English and Chinese and the chapter that explains it."""

    name: str
    english: str
    chinese: str
    explained: str  # a chapter ("02"), an appendix ("A") or a rung ("rung 21"); "" if none explains the term
    shape: str = ""
    lives: str = ""
    picture: str = ""  # the figure that shows the term, figures/NAME.svg


# name | chapter that explains it | shape | where it is stored | English | Chinese. "-" is an empty cell.
SYMBOLS = """
Q | 00 | (N_q, d) | HBM; a block q_i on chip | queries: what each row is looking for | 查询
K | 00 | (N_k, d) | HBM; a block k_j on chip | keys: what each position offers to be found by | 键
V | 00 | (N_k, d) | HBM; a block v_j on chip | values: what each position hands over | 值
S | 00 | (N_q, N_k) | one tile s_ij on chip, never whole | scores, τ Q Kᵀ | 注意力分数
P | 00 | (N_q, N_k) | one tile p_ij on chip, never whole | probabilities, softmax of S by rows | 注意力权重
O | 00 | (N_q, d) | HBM; accumulator o_i on chip | output, P V | 输出
dO | 01 | (N_q, d) | HBM | gradient of the loss with respect to O; the caller passes it in | 输出的梯度
dQ | 01 | (N_q, d) | HBM | gradient of the loss with respect to Q | 查询的梯度
dK | 01 | (N_k, d) | HBM; accumulator dk_j on chip | gradient of the loss with respect to K | 键的梯度
dV | 01 | (N_k, d) | HBM; accumulator dv_j on chip | gradient of the loss with respect to V | 值的梯度
dS | 01 | (N_q, N_k) | one tile ds_ij on chip | gradient with respect to S: P ∘ (dP − D) | 分数的梯度
dP | 01 | (N_q, N_k) | one tile dp_ij on chip | gradient with respect to P: dO Vᵀ | 权重的梯度
D | 01 | (N_q,) | HBM | rowsum(dO ∘ O) = rowsum(P ∘ dP): what softmax subtracts from every dP of a row | 行内积
L | 01 | (N_q,) | HBM | natural logarithm of rowsum(exp(S)); P = exp(S − L) | 对数求和指数
m | 02 | (N_q,) | registers (FA1: HBM too) | largest score of a row so far | 行最大值
l | 02 | (N_q,) | registers (FA1: HBM too) | rowsum(exp(S − m)) so far; the papers' ℓ | 指数和
tau | 01 | number | argument | scale of the scores, usually 1 / √d; the papers' τ | 缩放系数
alpha | 02 | (B_r,) | registers | exp(m_old − m_new): what old sums are multiplied by | 缩放因子
B_r | 03 | number | compile time | rows of a tile; BLOCK_M in other kernels | 行块大小
B_c | 03 | number | compile time | columns of a tile; BLOCK_N in other kernels | 列块大小
T_r | 03 | number | - | row blocks: ⌈N_q / B_r⌉ | 行块数
T_c | 03 | number | - | column blocks: ⌈N_k / B_c⌉ | 列块数
M | 03 | number | - | elements that fit in on-chip memory | 片上存储容量
N | 00 | number | - | sequence length; N_q queries and N_k keys if they differ | 序列长度
d | 00 | number | - | head dimension: the length of a query, a key, a value | 头维度
"""

# name | chapter or rung that explains it | picture that shows it | English | Chinese. An indented line continues the
# line above.
WORDS = """
# The map of a GPU
HBM | 00 | - | high-bandwidth memory: the GPU's main memory, large and far away | 高带宽显存
DRAM | 00 | - | the kind of memory that HBM is made of; the GPU can count the bytes that reach it | 动态随机存储器
L1 | 00 | - | a cache in each SM that keeps what the SM loaded lately, in the same memory as shared memory | 一级缓存
L2 | 00 | - | a cache between HBM and all SMs that keeps what came from HBM lately | 二级缓存
SRAM | 00 | - | fast memory on the chip; in these papers the shared memory | 片上静态存储
shared memory | 00 | - | the part of an SM's SRAM that a thread block's warps read and write together | 共享内存
register | 00 | - | storage of one thread, the fastest memory there is | 寄存器
register spill | A | block_budget | values that no longer fit in registers go to slow memory and back | 寄存器溢出
on chip | 00 | - | in the registers or the shared memory of an SM, or on the way between them | 片上
SM | 00 | - | streaming multiprocessor: one of the chip's processors; runs thread blocks | 流式多处理器
tensor core | 00 | - | the unit of an SM that multiplies small matrices | 张量核心
FP32 unit | 00 | - | a unit of an SM that adds and multiplies single numbers of 32 bits | 单精度运算单元
special function unit | 00 | - | a unit of an SM that computes exponentials, logarithms and reciprocals | 特殊函数单元
kernel | 00 | - | a function that runs on the GPU, many thread blocks at once | 核函数
grid | 06 | - | all thread blocks of one launch | 网格
thread block | 00 | - | threads that run on one SM and share its memory; one worker of figure 2 | 线程块
program | 08 | - | Triton's word for a thread block: one run of the kernel, with its own number | 程序实例
warp | 00 | - | 32 threads that issue instructions together; a thread block has several | 线程束
warpgroup | 12a | wgmma | four warps in a row that start matrix products together, from Hopper on | 线程束组
thread | 00 | - | one lane of a warp | 线程
lane | A | row_reduction | the number of a thread in its warp, 0 to 31 | 线程束通道
wave | 06 | waves | all thread blocks that the chip runs at the same time; the last one is often not full | 波次
wave quantization | 06 | - | time lost because the last wave is not full | 波次量化
stride | 08 | - | how far apart two neighbours of one dimension are in memory, counted in elements | 步长
coalescing | 08 | - | a warp's load fetches each sector that its threads ask for only once | 合并访存
sector | 08 | - | 32 bytes of memory, the least that a load fetches | 扇区
shuffle | 08 | - | each thread of a warp reads a register of another thread of its warp | 线程束洗牌
barrier | 07 | - | a point where a block's warps wait for each other | 同步屏障
atomic add | 05 | - | read, add and write as one step that no other thread can interrupt | 原子加
race | 05 | - | two workers read the same old value; one of their updates is lost | 数据竞争
bank conflict | A | swizzle_xor | threads of a warp that want different words of one bank of shared memory, one
    after the other | 存储体冲突
swizzle | A | swizzle_xor | to store each row of a tile in another order, so that columns meet different banks |
    地址交错
# Quantities
FLOP | 00 | - | one floating-point operation; a multiply-add is two | 浮点运算
multiply-add | 00 | - | a · b + c in one instruction (FMA) | 乘加
fusion | 00 | - | several steps in one kernel, so that intermediate results stay on chip | 算子融合
bandwidth | 00 | - | bytes that a path delivers per second | 带宽
GEMM | 04 | - | general matrix multiplication: a kernel that computes a product tile by tile | 通用矩阵乘法
matmul | 00 | - | matrix product; a FLOP is one addition or one multiplication in it | 矩阵乘法
extra memory | 00 | - | what an algorithm must hold beyond its inputs and outputs | 额外显存
request | 04 | - | an element that an SM loads or stores, whether L2 or DRAM holds it | 访存请求
memory-bound | 01 | - | of a kernel: its time is set by the bytes that it moves | 访存受限
compute-bound | 01 | - | of a kernel: its time is set by its arithmetic | 计算受限
arithmetic intensity | 01 | - | FLOPs done for each byte that moves | 计算强度
IO complexity | 03 | - | elements that move to and from HBM, as a function of N, d and M, without a cache | 访存复杂度
# The workshop
launch option | 11 | - | what a launch asks of the compiler: warps, stages, registers | 启动选项
PTX | 11 | - | NVIDIA's portable assembly language, which Triton writes | 并行线程执行汇编
SASS | 11 | - | the machine code that an NVIDIA GPU executes | 机器汇编
issue slot | 10 | - | a clock in which one of an SM's four schedulers starts one instruction of a warp | 发射槽
mean-value analysis | 10 | speedup_by_heads | how long workers wait at units that they share, from what each finds
    there on average | 均值分析
latency | 00 | - | time from asking for a number until it is there | 延迟
prefetch | 10 | - | to ask for a tile before it is needed | 预取
cp.async | 10 | - | an instruction that copies to shared memory without passing through registers; LDGSTS in SASS |
    异步拷贝
scoreboard | 10 | - | the hardware's table of registers whose value is not there yet | 记分板
occupancy | 10 | - | the share of an SM's slots for warps that are in use | 占用率
roofline | 04 | roofline | what memory and arithmetic units allow at most, by FLOPs per byte | 屋顶线模型
stall | 10 | - | a warp cannot issue its next instruction; the hardware counts the reasons | 停顿
deadlock | 12a | - | a closed chain of workers, each of which waits for the next | 死锁
autotuner | 11 | - | a program that times many launches and keeps the fastest | 自动调优器
throttling | 10 | - | the GPU lowers its clock because it draws much power or is hot | 降频
# The method
head | 00 | - | one of several attentions computed side by side | 注意力头
softmax | 00 | - | exponentials of a row, divided by their sum | 归一化指数函数
standard attention | 00 | - | S, P and O one after the other, with S and P in HBM | 标准注意力
safe softmax | 01 | - | softmax with the row's maximum subtracted, so that exp cannot overflow | 安全 softmax
online softmax | 02 | - | softmax of a row that arrives in pieces, computed by keeping m and l and by rescaling |
    在线 softmax
rescale | 02 | - | multiply what was summed under an old maximum by alpha | 重新缩放
logsumexp | 01 | - | log of a sum of exponentials, computed as m + log l | 对数求和指数
merge | 02 | - | join two softmax states of disjoint keys: blocks, warps, splits or GPUs | 合并
tile | 00 | - | the B_r × B_c patch of S where row block i meets column block j | 分块
row block | 03 | - | B_r queries, with their rows of O | 行块
column block | 03 | - | B_c keys, with their values | 列块
recompute | 05 | - | compute S and P again in the backward pass instead of storing them | 重计算
causal mask | 04 | - | a query sees no later key; aligned to the bottom right corner of S | 因果掩码
padding | - | - | keys added to make lengths equal, which no query may see | 填充
deterministic | 05 | - | of a kernel: the same inputs give the same result bit for bit, in every run | 确定性的
dropout | 05 | - | each probability is set to 0 with probability p, the others divided by 1 − p | 随机失活
multi-query attention | 05 | - | all query heads share one head of keys and values | 多查询注意力
grouped-query attention | 05 | - | GQA: each group of query heads shares one head of keys and values |
    分组查询注意力
KV cache | 05 | - | keys and values kept from earlier tokens | 键值缓存
batch-invariant | 14 | - | of a kernel: a row's result does not depend on the other rows of the batch | 批次不变的
decode | 14 | decode_programs | making one token at a time: one query row, many keys | 逐词解码
Little's law | 14 | - | speed = bytes on their way / latency | 利特尔法则
split-K | 07 | warp_split | the keys are divided among workers, which must merge their results | 按键切分
split-Q | 07 | warp_split | the queries are divided among workers, which need nothing from each other | 按查询切分
# The ladder
base 2 | rung 06 | - | 2ˣ instead of eˣ: scale and log₂e are one factor, and the hardware has 2ˣ | 以二为底
pipelining | 10 | - | the next tiles are being copied while this one is computed | 软件流水
stage | 12a | pipelines_forward | one of the buffers of a ring or of a pipeline, with room for one tile | 流水级
bulk copy | rung 14 | bulk_copy | a copy of a whole tile that one thread starts and the copy engine carries out |
    批量拷贝
TMA | 12a | bulk_copy | tensor memory accelerator: Hopper's copy engine | 张量内存加速器
descriptor | 12a | bulk_copy | the address, shape and strides of a tensor, written down once for the copy engine |
    张量描述符
wgmma | 12a | wgmma | Hopper's instruction for the matrix product of a warpgroup | 线程束组矩阵乘
layout | 12a | row_reduction | which thread holds which number of a tile, or where in shared memory it is stored | 布局
Gluon | 12a | - | Triton's lower dialect: layouts, copies and barriers are written out | Gluon（Triton 的底层语言）
phase | 12a | - | what a barrier in shared memory counts, 0, 1, 0, …, with one phase for each full round
    (phase parity) | 相位
fence | 12a | - | what threads wrote before it is seen by the copy engine after it | 内存栅栏
proxy | 12a | - | the path by which threads, or the copy engine and the tensor cores, reach shared memory; a fence
    orders accesses of two paths | 访存代理
warp specialisation | 12a | pipelines_forward | warps of one program have different jobs: one copies, others compute |
    线程束特化
aggregate | 12b | - | several values of a Gluon kernel under one name, with methods | 聚合
inline assembly | 12a | - | machine instructions written out inside a kernel | 内联汇编
ring | 12a | pipelines_forward | circular buffer: stages in shared memory that are filled and emptied in turn |
    环形缓冲区
producer | 12a | pipelines_forward | the warp that copies tiles ahead | 生产者
consumer | 12a | pipelines_forward | a warpgroup that computes with the tiles that the producer copied | 消费者
overlap | rung 20 | overlap_timeline | two units work at the same time | 计算重叠
ping-pong | 12b | overlap_timeline | two consumers alternate: one computes products while the other does its softmax |
    乒乓调度
persistent | rung 21 | dynamic_scheduling | of a program: it stays on its SM and takes one row block after another |
    常驻
tile scheduler | rung 21 | dynamic_scheduling | the code that tells a persistent program which row block comes next |
    分块调度器
dynamic scheduling | 12a | dynamic_scheduling | a program fetches its next row block when it is free; in static
    scheduling, all row blocks are assigned in advance | 动态调度
mailbox | 12a | - | a slot in shared memory where one warp leaves numbers for others | 信箱
cluster | 12b | - | thread blocks on neighbouring SMs that may read each other's shared memory | 线程块簇
multicast | 12b | - | one copy that brings a tile from L2 to several SMs of a cluster | 多播
prologue | 13 | - | what a pipelined loop does before its first whole step | 流水序段
epilogue | 13 | - | what is left for a pipelined loop to do after its last step | 流水尾段
bulk reduction | 13 | pipelines_backward | the copy engine adds a tile of shared memory to HBM | 批量归约
programmatic dependent launch | 13 | backward_launches | PDL: a kernel is launched before the kernel before it has
    ended, and waits by itself | 编程式依赖启动
turn | 13 | - | the right to add next, in a fixed order that a counter in HBM, the semaphore, keeps | 轮次
denormal | 10 | - | a number so small that its exponent has no room; fast units make 0 of it | 非规格化数
lagging | rung 22 | - | lazy rescaling: m follows the row's maximum only when a score is far above it | 滞后最大值
split-KV | 14 | decode_programs | the keys of one row block are divided among programs, which merge at the end |
    键值切分
part | 14 | decode_shares | the state o, m and l that a program leaves when it has read some of a row's keys | 部分状态
page | 14 | - | a piece of a KV cache with room for a fixed number of keys | 缓存页
block table | 14 | - | lists for each sequence the page that holds its first keys, its next keys, … | 块表
K/V head | 14 | - | a head of keys and values, which a group of query heads may share | 键值头
stream-K | 14 | decode_shares | split-KV in equal shares: all tiles are laid end to end and cut into equal pieces |
    等份切分
rank | 15 | ring_schedule | one process with its GPU, of several that work together | 进程编号
shard | 15 | zigzag | the part of a sequence that one rank keeps | 分片
ring attention | 15 | ring_schedule | keys and values travel around a ring of GPUs, and each GPU keeps its queries |
    环形注意力
all-to-all | 15 | - | an exchange in which every rank sends a part of its data to every rank | 全交换
zigzag | 15 | zigzag | each rank keeps a piece from the front and one from the back | 之字形切分
# Masks
interval | 16 | mask_intervals | the keys from first up to last that one row sees | 区间
window | 16 | mask_intervals | how many keys before and after its own position a row sees: (left, right) | 滑动窗口
cu_seqlens | 16 | - | cumulative sequence lengths: where each packed sequence starts, and where the last one ends |
    累积序列长度
packed | 16 | mask_intervals | sequences of different lengths one after the other, without padding | 变长拼接
softcap | 16 | - | scores bounded by c: c · tanh(s / c) | 分数软上限
sink | 16 | mask_intervals | one more score for each head that has no value | 注意力汇
"""


def cells(table: str) -> list[list[str]]:
    """Parse a table into a list of rows, each a list of cells. A cell that contains only "-" becomes empty."""
    rows = [line for line in table.strip().replace("\n    ", " ").splitlines() if not line.startswith("#")]
    return [["" if cell == "-" else cell for cell in row.split(" | ")] for row in rows]


TERMS = (
    *(
        Term(name, english, chinese, explained, shape, lives)
        for name, explained, shape, lives, english, chinese in cells(SYMBOLS)
    ),
    *(
        Term(name, english, chinese, explained, picture=picture)
        for name, explained, picture, english, chinese in cells(WORDS)
    ),
)

GLOSSARY: dict[str, Term] = {term.name: term for term in TERMS}
