"""A cluster of CTAs and each other's shared memory, in Gluon by PTX: sm_90. Gluon has no name for either.

A program is a cluster then (num_ctas). In the layouts of this module every CTA has a whole tensor. The compiler takes
these for copies, and stores those of CTA 0 alone. What differs between CTAs is stored by PTX."""

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

MEET = gl.constexpr("barrier.cluster.arrive.release.aligned; barrier.cluster.wait.acquire.aligned; mov.u32 $0, 0;")
ARRIVE = gl.constexpr("barrier.cluster.arrive.release.aligned; mov.u32 $0, 0;")
AWAIT = gl.constexpr("barrier.cluster.wait.acquire.aligned; mov.u32 $0, 0;")
RANK = gl.constexpr("mov.u32 $0, %cluster_ctarank;")
LOAD = gl.constexpr(
    """{ .reg .pred p; .reg .b32 at; setp.ne.s32 p, $3, 0; mapa.shared::cluster.u32 at, $1, $2;
    mov.b32 $0, 0; @p ld.shared::cluster.b32 $0, [at]; }"""
)


@triton.constexpr_function
def line(threads, ctas):
    """The layout of [n]: neighbouring threads have neighbouring elements, and each of ``ctas`` CTAs has all."""
    return gl.BlockedLayout([1], [32], [threads // 32], [0], [[0]] * (ctas.bit_length() - 1))


@triton.constexpr_function
def plane(each, lanes, warps, ctas):
    """The layout of [n, m], by how many elements a thread has next to each other, lanes and warps: of two dimensions."""
    return gl.BlockedLayout(each, lanes, warps, [1, 0], [[0, 0]] * (ctas.bit_length() - 1))


@triton.constexpr_function
def _tell(ctas):
    return f"""{{ .reg .pred p; .reg .b32 cta, at; mov.u32 cta, %tid.x; setp.lt.u32 p, cta, {ctas};
    @p mapa.shared::cluster.u32 at, $1, cta; @p st.shared::cluster.b32 [at], $2; mov.u32 $0, 0; }}"""


@gluon.jit
def rank():
    return gl.inline_asm_elementwise(RANK, "=r", [], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def meet():
    """All threads of all CTAs are here; what they stored before, in any CTA, is there."""
    gl.inline_asm_elementwise(MEET, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def arrive():
    """The first half of ``meet``, and of what lets a CTA end: no other CTA reads its memory after ``await_all``."""
    gl.inline_asm_elementwise(ARRIVE, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def await_all():
    gl.inline_asm_elementwise(AWAIT, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def load_of(smem, word, cta, valid):
    """Word ``word`` of CTA ``cta``'s shared memory where ``valid`` (int32) is not 0, else 0."""
    operands = [smem + word * 4, cta, valid]
    return gl.inline_asm_elementwise(LOAD, "=&r,r,r,r", operands, dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def tell_all(smem, word, value, CTAS: gl.constexpr):
    """Store the scalar ``value`` at word ``word`` of every CTA, this one too."""
    operands = [smem + word * 4, value]
    gl.inline_asm_elementwise(_tell(CTAS), "=r,r,r", operands, dtype=gl.int32, is_pure=False, pack=1)
