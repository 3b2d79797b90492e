"""A cluster of CTAs that store into each other's shared memory, in Gluon by PTX: sm_90. Gluon has no name for it.

A program is a cluster then (num_ctas). In the layouts of this module every CTA has a whole tensor. The compiler takes
these for copies, and stores those of CTA 0 alone. What differs between CTAs is stored by PTX.

``send`` stores in another CTA, and tells an mbarrier there how many bytes have come (st.async). Who waits for all bytes
sees them. So neither side needs a fence, which on sm_90 waits for all of the GPU.
"""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

ARRIVE = gl.constexpr("barrier.cluster.arrive.release.aligned; mov.u32 $0, 0;")
AWAIT_ALL = gl.constexpr("barrier.cluster.wait.acquire.aligned; mov.u32 $0, 0;")
RANK = gl.constexpr("mov.u32 $0, %cluster_ctarank;")
INIT = gl.constexpr(
    """{ .reg .pred p; .reg .b32 thread; mov.u32 thread, %tid.x; setp.eq.u32 p, thread, 0;
    @p mbarrier.init.shared::cta.b64 [$1], 1; @p fence.mbarrier_init.release.cluster; mov.u32 $0, 0; }"""
)
EXPECT = gl.constexpr(
    """{ .reg .pred p; .reg .b32 thread; mov.u32 thread, %tid.x; setp.eq.u32 p, thread, 0;
    @p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$1], $2; mov.u32 $0, 0; }"""
)
AWAIT = gl.constexpr(
    """{ .reg .pred p; AGAIN: mbarrier.try_wait.parity.shared::cta.b64 p, [$1], $2; @!p bra AGAIN; mov.u32 $0, 0; }"""
)


@triton.constexpr_function
def line(threads, ctas):
    """The layout of [n]: neighbouring threads have neighbouring elements, and each of ``ctas`` CTAs has all."""
    return gl.BlockedLayout([1], [32], [threads // 32], [0], [[0]] * (ctas.bit_length() - 1))


@triton.constexpr_function
def plane(each, lanes, warps, ctas):
    """The layout of [n, m]: each thread's neighbouring elements, a warp's lanes, and the warps, by dimension."""
    return gl.BlockedLayout(each, lanes, warps, [1, 0], [[0, 0]] * (ctas.bit_length() - 1))


@triton.constexpr_function
def _send(words):
    """PTX: the last ``words`` operands to address $1 and barrier $2 of CTA $3, unless $4 is 0."""
    values = ", ".join(f"${5 + word}" for word in range(words))
    vector = f".v{words}" if words > 1 else ""
    return f"""{{ .reg .pred p; .reg .b32 to, bar; setp.ne.s32 p, $4, 0;
    @p mapa.shared::cluster.u32 to, $1, $3; @p mapa.shared::cluster.u32 bar, $2, $3;
    @p st.async.weak.shared::cluster.mbarrier::complete_tx::bytes{vector}.b32 [to], {{{values}}}, [bar];
    mov.u32 $0, 0; }}"""


@gluon.jit
def rank():
    return gl.inline_asm_elementwise(RANK, "=r", [], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def arrive():
    """Say that this thread is here; see await_all. It waits for what the thread has stored, for all of the GPU."""
    gl.inline_asm_elementwise(ARRIVE, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_all():
    """All threads of all CTAs have arrived; what they stored before, in any CTA, is there."""
    gl.inline_asm_elementwise(AWAIT_ALL, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def init(smem, barrier):
    """Word ``barrier``, which is even, and the next become an mbarrier. Others may send behind ``await_all``."""
    gl.inline_asm_elementwise(INIT, "=r,r", [smem + barrier * 4], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def expect(smem, barrier, nbytes):
    """So many bytes come to this CTA in the barrier's phase."""
    operands = [smem + barrier * 4, nbytes]
    gl.inline_asm_elementwise(EXPECT, "=r,r,r", operands, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_bytes(smem, barrier, phase):
    """Until they are there. phase: 0, then 1, ..."""
    operands = [smem + barrier * 4, phase]
    gl.inline_asm_elementwise(AWAIT, "=r,r,r", operands, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def send(smem, word, barrier, cta, valid, value):
    """Store ``value`` at word ``word`` of CTA ``cta``, where ``valid`` (int32) is not 0."""
    operands = [smem + word * 4, smem + barrier * 4 + word * 0, cta, valid, value]
    gl.inline_asm_elementwise(_send(1), "=r,r,r,r,r,r", operands, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def send_two(smem, word, barrier, cta, valid, a, b):
    """The same of two words, from an even one on."""
    operands = [smem + word * 4, smem + barrier * 4 + word * 0, cta, valid, a, b]
    gl.inline_asm_elementwise(_send(2), "=r,r,r,r,r,r,r", operands, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def send_four(smem, word, barrier, cta, valid, a, b, c, d):
    """The same of four words, from a multiple of four on."""
    operands = [smem + word * 4, smem + barrier * 4 + word * 0, cta, valid, a, b, c, d]
    gl.inline_asm_elementwise(_send(4), "=r,r,r,r,r,r,r,r,r", operands, dtype=gl.int32, is_pure=False, pack=1)
