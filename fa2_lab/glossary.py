"""The words and symbols of the book: English, Chinese, and where each is explained."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Term:
    """A symbol or a word: its meaning in English and Chinese, where it is explained, shape, place, and a picture."""

    name: str
    english: str
    chinese: str
    explained: str  # a chapter, as "02", or a rung of the ladder, as "rung 16"; empty: not in the book
    shape: str = ""
    lives: str = ""
    picture: str = ""  # that shows it: figures/NAME.svg


def symbol(name: str, explained: str, shape: str, lives: str, english: str, chinese: str) -> Term:
    return Term(name, english, chinese, explained, shape, lives)


TERMS = (
    # Symbols
    symbol("Q", "00", "(N_q, d)", "HBM; a block q_i on chip", "queries: what each row is looking for", "查询"),
    symbol("K", "00", "(N_k, d)", "HBM; a block k_j on chip", "keys: what each position offers to be found by", "键"),
    symbol("V", "00", "(N_k, d)", "HBM; a block v_j on chip", "values: what each position hands over", "值"),
    symbol("S", "00", "(N_q, N_k)", "one tile s_ij on chip, never whole", "scores, τ Q Kᵀ", "注意力分数"),
    symbol(
        "P",
        "00",
        "(N_q, N_k)",
        "one tile p_ij on chip, never whole",
        "probabilities, softmax of S by rows",
        "注意力权重",
    ),
    symbol("O", "00", "(N_q, d)", "HBM; accumulator o_i on chip", "output, P V", "输出"),
    symbol(
        "dO", "01", "(N_q, d)", "HBM", "gradient of the loss with respect to O; it comes from outside", "输出的梯度"
    ),
    symbol("dQ", "01", "(N_q, d)", "HBM", "gradient of the loss with respect to Q", "查询的梯度"),
    symbol(
        "dK", "01", "(N_k, d)", "HBM; accumulator dk_j on chip", "gradient of the loss with respect to K", "键的梯度"
    ),
    symbol(
        "dV", "01", "(N_k, d)", "HBM; accumulator dv_j on chip", "gradient of the loss with respect to V", "值的梯度"
    ),
    symbol(
        "dS", "01", "(N_q, N_k)", "one tile ds_ij on chip", "gradient with respect to S: P ∘ (dP − D)", "分数的梯度"
    ),
    symbol("dP", "01", "(N_q, N_k)", "one tile dp_ij on chip", "gradient with respect to P: dO Vᵀ", "权重的梯度"),
    symbol(
        "D",
        "01",
        "(N_q,)",
        "HBM",
        "rowsum(dO ∘ O) = rowsum(P ∘ dP): what softmax takes off every dP of a row",
        "行内积",
    ),
    symbol("L", "01", "(N_q,)", "HBM", "natural logarithm of rowsum(exp(S)); P = exp(S − L)", "对数求和指数"),
    symbol("m", "02", "(N_q,)", "registers (FA1: HBM too)", "largest score of a row so far", "行最大值"),
    symbol("l", "02", "(N_q,)", "registers (FA1: HBM too)", "rowsum(exp(S − m)) so far; the papers' ℓ", "指数和"),
    symbol("tau", "01", "number", "argument", "scale of the scores, usually 1 / √d; the papers' τ", "缩放系数"),
    symbol("alpha", "02", "(B_r,)", "registers", "exp(m_old − m_new): what old sums are multiplied by", "缩放因子"),
    symbol("B_r", "03", "number", "compile time", "rows of a tile; BLOCK_M in other kernels", "行块大小"),
    symbol("B_c", "03", "number", "compile time", "columns of a tile; BLOCK_N in other kernels", "列块大小"),
    symbol("T_r", "03", "number", "", "row blocks: ⌈N_q / B_r⌉", "行块数"),
    symbol("T_c", "03", "number", "", "column blocks: ⌈N_k / B_c⌉", "列块数"),
    symbol("M", "03", "number", "", "elements that fit in on-chip memory", "片上存储容量"),
    symbol("N", "00", "number", "", "sequence length; N_q queries and N_k keys where they differ", "序列长度"),
    symbol("d", "00", "number", "", "head dimension: the length of a query, a key, a value", "头维度"),
    # The map of a GPU
    Term("HBM", "high-bandwidth memory: the GPU's main memory, large and far away", "高带宽显存", "00"),
    Term(
        "DRAM",
        "the kind of memory that HBM is made of; what crosses to it can be counted by the GPU",
        "动态随机存储器",
        "00",
    ),
    Term("L2", "a cache between HBM and all SMs: it keeps what came from HBM lately", "二级缓存", "00"),
    Term("SRAM", "fast memory on the chip; in these papers the shared memory", "片上静态存储", "00"),
    Term(
        "shared memory",
        "the part of an SM's SRAM that a thread block's warps read and write together",
        "共享内存",
        "00",
    ),
    Term("register", "storage of one thread, the fastest there is", "寄存器", "00"),
    Term(
        "register spill",
        "values that no longer fit in registers go to slow memory and back",
        "寄存器溢出",
        "A",
        picture="block_budget",
    ),
    Term("on chip", "in the registers or the shared memory of an SM, or on the way between them", "片上", "00"),
    Term("SM", "streaming multiprocessor: one of the chip's processors; runs thread blocks", "流式多处理器", "00"),
    Term("tensor core", "the unit of an SM that multiplies small matrices", "张量核心", "00"),
    Term("FP32 unit", "a unit of an SM that adds and multiplies single numbers of 32 bits", "单精度运算单元", "00"),
    Term(
        "special function unit",
        "a unit of an SM that takes exponentials, logarithms and reciprocals",
        "特殊函数单元",
        "00",
    ),
    Term("kernel", "a function that runs on the GPU, many thread blocks at once", "核函数", "00"),
    Term("grid", "all thread blocks of one launch", "网格", "06"),
    Term("thread block", "threads that run on one SM and share its memory; one worker of figure 2", "线程块", "00"),
    Term(
        "program", "Triton's word for a thread block: one run of the kernel, with a number of its own", "程序实例", "08"
    ),
    Term("warp", "32 threads that issue instructions together; a thread block has several", "线程束", "00"),
    Term(
        "warpgroup",
        "four warps in a row that start matrix products together, from Hopper on",
        "线程束组",
        "12",
        picture="wgmma",
    ),
    Term("thread", "one lane of a warp", "线程", "00"),
    Term("lane", "the number of a thread in its warp, 0 to 31", "线程束通道", "A", picture="row_reduction"),
    Term(
        "wave",
        "as many thread blocks as the chip runs at once; the last one is often not full",
        "波次",
        "06",
        picture="waves",
    ),
    Term("wave quantization", "time lost because the last wave is not full", "波次量化", "06"),
    Term("barrier", "a point where a block's warps wait for each other", "同步屏障", "07"),
    Term("atomic add", "read, add and write as one step that no other thread can interrupt", "原子加", "05"),
    Term("race", "two workers read the same old value; one of their updates is lost", "数据竞争", "05"),
    Term(
        "bank conflict",
        "threads of a warp that want different words of one bank of shared memory, one after the other",
        "存储体冲突",
        "A",
        picture="swizzle_xor",
    ),
    Term(
        "swizzle",
        "to store each row of a tile in another order, so that columns meet different banks",
        "地址交错",
        "A",
        picture="swizzle_xor",
    ),
    # Quantities
    Term("FLOP", "one floating-point operation", "浮点运算", "00"),
    Term("matmul", "matrix product; a FLOP is one addition or one multiplication in it", "矩阵乘法", "00"),
    Term("extra memory", "what an algorithm must hold beyond its inputs and outputs", "额外显存", "00"),
    Term("request", "an element that the chip asks for, wherever it is found; what the meter counts", "访存请求", "00"),
    Term("arithmetic intensity", "FLOPs done for each byte that moves", "计算强度", "01"),
    Term("IO complexity", "elements moved between HBM and the chip, as a function of N, d and M", "访存复杂度", "03"),
    # The workshop
    Term("launch option", "what a launch asks of the compiler: warps, stages, registers", "启动选项", "11"),
    Term("PTX", "NVIDIA's portable assembly language, which Triton writes", "并行线程执行汇编", "11"),
    Term("SASS", "the machine code that an NVIDIA GPU executes", "机器汇编", "11"),
    Term("occupancy", "the share of an SM's places for warps that are taken", "占用率", "11"),
    Term(
        "roofline",
        "what memory and arithmetic units allow at most, by FLOPs per byte",
        "屋顶线模型",
        "10",
        picture="roofline",
    ),
    Term("stall", "a warp cannot issue its next instruction; the hardware counts for which reason", "停顿", "11"),
    Term("deadlock", "a closed chain of workers, each of which waits for the next", "死锁", "11"),
    Term("autotuner", "a program that times many launches and keeps the fastest", "自动调优器", "11"),
    Term("throttling", "the GPU lowers its clock because it draws much power or is hot", "降频", "11"),
    # The method
    Term("head", "one of several attentions computed side by side", "注意力头", "00"),
    Term("softmax", "exponentials of a row, divided by their sum", "归一化指数函数", "00"),
    Term("standard attention", "S, P and O one after the other, with S and P in HBM", "标准注意力", "00"),
    Term(
        "safe softmax", "softmax with the row's maximum subtracted, so that exp cannot overflow", "安全 softmax", "01"
    ),
    Term(
        "online softmax", "softmax of a row that arrives in pieces, by keeping m, l and rescaling", "在线 softmax", "02"
    ),
    Term("rescale", "multiply what was summed under an old maximum by alpha", "重新缩放", "02"),
    Term("logsumexp", "log of a sum of exponentials, computed as m + log l", "对数求和指数", "01"),
    Term("merge", "join two softmax states of disjoint keys: blocks, warps, splits or GPUs", "合并", "02"),
    Term("tile", "the B_r × B_c patch of S where row block i meets column block j", "分块", "00"),
    Term("row block", "B_r queries, with their rows of O", "行块", "03"),
    Term("column block", "B_c keys, with their values", "列块", "03"),
    Term("recompute", "make S and P again in the backward pass instead of storing them", "重计算", "05"),
    Term("causal mask", "a query sees no later key; aligned to the bottom right corner of S", "因果掩码", "04"),
    Term("padding", "keys added to make lengths equal; nobody may see them", "填充", ""),
    Term("dropout", "each probability is set to 0 with probability p, the others divided by 1 − p", "随机失活", "03"),
    Term("multi-query attention", "all query heads share one head of keys and values", "多查询注意力", "05"),
    Term(
        "grouped-query attention",
        "each group of query heads shares one head of keys and values",
        "分组查询注意力",
        "05",
    ),
    Term("KV cache", "keys and values kept from earlier tokens", "键值缓存", "05"),
    Term("decode", "making one token at a time: one query row, many keys", "逐词解码", "14", picture="programs"),
    Term(
        "split-K",
        "the keys are divided among workers, which must merge their answers",
        "按键切分",
        "07",
        picture="warp_split",
    ),
    Term(
        "split-Q",
        "the queries are divided among workers, which need nothing from each other",
        "按查询切分",
        "07",
        picture="warp_split",
    ),
    # The ladder
    Term("base 2", "2ˣ instead of eˣ: scale and log₂e are one factor, and the hardware has 2ˣ", "以二为底", "rung 05"),
    Term("pipelining", "the next tiles are being copied while this one is computed", "软件流水", "rung 08"),
    Term(
        "stage",
        "one of the places of a ring or of a pipeline; it has room for one tile",
        "流水级",
        "12",
        picture="pipes",
    ),
    Term("sweep", "to measure many sizes of tiles, warps and stages, and keep the fastest", "参数扫描", "rung 09"),
    Term(
        "bulk copy",
        "a copy of a whole tile that one thread starts and the copy engine carries out",
        "批量拷贝",
        "rung 11",
        picture="bulk_copy",
    ),
    Term("TMA", "tensor memory accelerator: Hopper's copy engine", "张量内存加速器", "12", picture="bulk_copy"),
    Term(
        "descriptor",
        "where a tensor lies and how, written down once for the copy engine",
        "张量描述符",
        "12",
        picture="bulk_copy",
    ),
    Term(
        "wgmma", "Hopper's instruction for the matrix product of a warpgroup", "线程束组矩阵乘", "12", picture="wgmma"
    ),
    Term(
        "layout",
        "which thread holds which number of a tile, or where in shared memory it lies",
        "布局",
        "12",
        picture="row_reduction",
    ),
    Term(
        "Gluon",
        "Triton's lower dialect: layouts, copies and barriers are written out",
        "Gluon（Triton 的底层语言）",
        "12",
    ),
    Term("phase", "what a barrier in shared memory counts through, 0, 1, 0, …: one for each full round", "相位", "12"),
    Term("fence", "what threads wrote before it is seen by the copy engine after it", "内存栅栏", "12"),
    Term(
        "warp specialisation",
        "warps of one program have different jobs: one copies, others compute",
        "线程束特化",
        "12",
        picture="pipes",
    ),
    Term("aggregate", "several values of a Gluon kernel under one name, with methods", "聚合", "12"),
    Term("inline assembly", "machine instructions written out inside a kernel", "内联汇编", "12"),
    Term("ring", "stages in shared memory that are filled and emptied in turn", "环形缓冲区", "12", picture="pipes"),
    Term("producer", "the warp that copies tiles ahead", "生产者", "12", picture="pipes"),
    Term(
        "consumer", "a warpgroup that computes with the tiles that the producer copied", "消费者", "12", picture="pipes"
    ),
    Term("overlap", "two units work at the same time", "计算重叠", "rung 15", picture="timeline"),
    Term(
        "ping-pong",
        "two consumers take turns: one computes products while the other is at its softmax",
        "乒乓调度",
        "12",
        picture="timeline",
    ),
    Term(
        "persistent",
        "of a program: it stays on its SM and takes one row block after the other",
        "常驻",
        "rung 16",
        picture="tickets",
    ),
    Term(
        "tile scheduler",
        "what tells a persistent program which row block comes next",
        "分块调度器",
        "rung 16",
        picture="tickets",
    ),
    Term("mailbox", "a place in shared memory where one warp leaves numbers for others", "信箱", "12"),
    Term("prologue", "what a pipelined loop does before its first whole step", "流水序段", "13"),
    Term("epilogue", "what is left for a pipelined loop to do after its last step", "流水尾段", "13"),
    Term(
        "bulk reduction",
        "the copy engine adds a tile of shared memory to HBM",
        "批量归约",
        "13",
        picture="pipes",
    ),
    Term("lagging", "of m: it follows the row's maximum only when a score lies far above it", "滞后最大值", "rung 19"),
    Term(
        "split-KV",
        "the keys of one row block are divided among programs, which merge at the end",
        "键值切分",
        "14",
        picture="programs",
    ),
    Term(
        "part",
        "the state o, m and l that a program leaves when it has read some of a row's keys",
        "部分状态",
        "14",
        picture="shares",
    ),
    Term("page", "a piece of a KV cache with room for a fixed number of keys", "缓存页", "14"),
    Term("block table", "says for each sequence which page holds its first keys, its next keys, …", "块表", "14"),
    Term("K/V head", "a head of keys and values, which a group of query heads may share", "键值头", "14"),
    Term(
        "stream-K",
        "split-KV in equal shares: all tiles laid end to end and cut into equal pieces",
        "等份切分",
        "14",
        picture="shares",
    ),
    Term("rank", "one process with its GPU, of several that work together", "进程编号", "15", picture="ring_schedule"),
    Term("shard", "the part of a sequence that one rank keeps", "分片", "15", picture="zigzag"),
    Term(
        "ring attention",
        "keys and values travel around a ring of GPUs, and each GPU keeps its queries",
        "环形注意力",
        "15",
        picture="ring_schedule",
    ),
    Term("all-to-all", "an exchange in which every rank has a parcel for every rank", "全交换", "15"),
    Term(
        "zigzag", "each rank keeps a piece from the front and one from the back", "之字形切分", "15", picture="zigzag"
    ),
    # Masks
    Term("interval", "the keys from first up to last that one row sees", "区间", "16", picture="intervals"),
    Term(
        "window",
        "how many keys before and after its own place a row sees: (left, right)",
        "滑动窗口",
        "16",
        picture="intervals",
    ),
    Term(
        "packed",
        "sequences of different lengths one after the other, without padding",
        "变长拼接",
        "16",
        picture="intervals",
    ),
    Term("softcap", "scores bounded by c: c · tanh(s / c)", "分数软上限", "16"),
    Term("sink", "one more score for each head that has no value", "注意力汇", "16", picture="intervals"),
)

GLOSSARY: dict[str, Term] = {term.name: term for term in TERMS}
