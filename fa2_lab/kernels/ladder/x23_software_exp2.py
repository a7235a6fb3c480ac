"""Side rung x23, software exp2: some of the exponentials of rung 23 are computed by the FMA units.

2ˣ = 2ⁿ 2ᶠ with n = ⌊x⌋ and f in [0, 1). A cubic polynomial approximates 2ᶠ to within 9e-5, which is far more precise
than a p rounded to 16 bits, and n becomes the exponent. The kernel should be faster than rung 23 on a B200, where only
the exponential unit limits the speed. On an H200, by contrast, the tensor cores, the exponential unit and the issue
slots limit the speed equally, and the polynomial takes nine instructions instead of one.

Three mistakes would go unnoticed. If a plain max clamped x, NaN would become 0, as if the key were masked, so the code
clamps with max.NaN. If n were added to the bits of the exponent, NaN would become 3.4e38, so the code multiplies by 2ⁿ.
If x were clamped at −126, −∞ would give p = 1.2e-38, and a row without keys would get the mean of V, so x is clamped at
−127, for which 2ⁿ is zero.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from fa2_lab.kernels import ladder

wide = ladder.copied("r23")  # a copy of rung 23, whose softmax is replaced below
split_lanes, broadcast_state = wide.split_lanes, wide.broadcast_state
update_row_max, LAG = wide.update_row_max, wide.LAG
EVERY = gl.constexpr(8)  # the FMA units compute one in EVERY exponentials


@gluon.constexpr_function
def cubic(y, x):
    """Return PTX that computes y = 2^x for x < 128 without the exponential unit. NaN stays NaN, and −∞ gives +0."""
    return f"""max.NaN.f32 a, {x}, 0fC2FE0000; add.rm.f32 t, a, 0f4B400000;
sub.rn.f32 f, t, 0f4B400000; sub.rn.f32 f, a, f;
fma.rn.f32 r, f, 0f3D9DD556, 0f3E691BC4; fma.rn.f32 r, r, f, 0f3F31F32D; fma.rn.f32 r, r, f, 0f3F800000;
mov.b32 n, t; mad.lo.s32 n, n, 0x800000, 0x3F800000; mov.b32 t, n; mul.rn.f32 {y}, r, t;"""


@gluon.constexpr_function
def one_in(every):
    """Return PTX for 8 exponentials. One in `every` of them uses cubic(), and the others use the exponential unit."""
    soft = [i % every == every - 1 for i in range(8)]
    lines = [cubic(f"${i}", f"${8 + i}") if soft[i] else f"ex2.approx.ftz.f32 ${i}, ${8 + i};" for i in range(8)]
    return "\n".join(["{ .reg .f32 a, t, f, r; .reg .b32 n;", *lines, "}"])


@gluon.jit
def exp2_mixed(x):
    """Return 2^x. The FMA units compute one in EVERY exponentials, and the exponential unit computes the others."""
    registers: gl.constexpr = "=&f,=&f,=&f,=&f,=&f,=&f,=&f,=&f,f,f,f,f,f,f,f,f"
    return gl.inline_asm_elementwise(one_in(EVERY), registers, [x], gl.float32, is_pure=True, pack=8)


@gluon.jit
def softmax(s_ij, l_i, m_i, tau_log2):
    """Update l and m with a tile's scores. Return p, alpha (the factor by which to rescale o), and the new l and m."""
    x = split_lanes(s_ij)  # (64, B_c / 8, 4, 2)
    top = gl.convert_layout(tau_log2 * gl.max(gl.max(x, 3), 1), m_i.type.layout)  # (64, 4)
    m_new = update_row_max(m_i, top, m_i + LAG)  # (64, 4)
    p_ij = exp2_mixed(tau_log2 * x - broadcast_state(m_new, x))  # (64, B_c / 8, 4, 2), each at most 2^LAG
    alpha = gl.exp2(m_i - m_new)  # (64, 4)
    l_i = alpha * l_i + gl.sum(gl.sum(p_ij, 3), 1)  # (64, 4)
    return gl.convert_layout(p_ij.reshape(s_ij.shape), s_ij.type.layout), alpha, l_i, m_new


wide.softmax = softmax
forward = wide.forward
