"""What warp-specialised kernels share, in Gluon: only they import this."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma

from sparse_attn.device.pdl import LAUNCH_DEPENDENTS, WAIT
from sparse_attn.device.triton_private import VERSION

# By their names in triton 3.6 or in later ones.
barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier
async_load = async_copy.async_load if hasattr(async_copy, "async_load") else async_copy.async_copy_global_to_shared
tma_load = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared

# mbarrier.expect begins with a barrier of its own: seen in the PTX of triton 3.8 and 3.9, not in that of 3.6.
EXPECT_WAITS = gl.constexpr(VERSION in ((3, 8), (3, 9)))  # 3.7 was not seen
FIRST_LANE = gl.constexpr("shfl.sync.idx.b32 $0, $1, 0, 31, -1;")
BRANCH = gl.constexpr("""{
.reg .pred p;
mov.b32 $0, 0;
setp.ne.s32 p, $1, -1;
@p bra past;
again: nanosleep.u32 1;
mov.u32 $0, %clock;
setp.lt.u32 p, $0, 9;
@p bra again;
past:
}""")


@gluon.jit
def wait():
    """As pdl.wait_only: in each partition of warps that specialise, or before there are any."""
    gl.inline_asm_elementwise(WAIT, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def launch_dependents():
    """The next launch may start once all programs are here."""
    gl.inline_asm_elementwise(LAUNCH_DEPENDENTS, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def signal(bar):
    """Everything this warpgroup did so far is done: say so. (No bytes are expected; behind ``mbarrier.arrive`` the
    compiler puts a barrier of its own, in triton 3.8 and 3.9 before ``expect``, too.)"""
    if not EXPECT_WAITS:
        barrier()
    mbarrier.expect(bar, 0)


@gluon.jit
def uniform(number):
    """``number``, the same in every lane, so that the compiler knows it too and keeps what follows from it in uniform
    registers. What gl.sum ends in shuffles (triton 3.8) it takes for a number of each lane's own."""
    return gl.inline_asm_elementwise(FIRST_LANE, "=r,r", [number], dtype=gl.int32, is_pure=True, pack=1)


@gluon.jit
def keep_order(number):
    """0, behind a loop that is never entered, for ``number`` is not -1, which must be no constant. ptxas sinks no
    arithmetic over this, and cannot hoist over it what reads the 0, which it does not know."""
    return gl.inline_asm_elementwise(BRANCH, "=&r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def here(number):
    """``number``, which the compiler does not know before this place. Triton 3.9 else computes the matrix descriptors
    of many products ahead of the first, more than uniform registers hold; ptxas drops the move."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [number], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """(stage, phase) of a ring behind these."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)
