"""What warp-specialised kernels share, in Gluon: only they import this."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

barrier = gl.thread_barrier if hasattr(gl, "thread_barrier") else gl.barrier  # triton 3.6, and later


@gluon.jit
def signal(bar):
    """Everything this warpgroup did so far is done: say so."""
    barrier()
    mbarrier.arrive(bar, count=1)
