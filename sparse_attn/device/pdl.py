"""Programmatic dependent launch (PDL): a kernel starts while the one before it ends.

A CTA that starts early has its scalars, shared memory and barriers ready when its data is. Before it waits it touches
no memory that another launch writes. Every kernel launched with PDL waits (``griddepcontrol.wait``), so completion is
transitive: after the wait, all launches before it are done.

What is older than that it may read. A launch that waits before it lets the next one start (``wait``) has all memory
before it written when any later launch starts. So behind such a launch, with any others in between, what that one read
can be read before the wait: ops/topk/ranks does so. No launch of this library writes packed weights, so they can be
read before the wait, too: ops/layers/products/hopper does so. Its contract asks whoever writes them for a launch
between that does not start early.
"""

import triton
import triton.language as tl

WAIT = tl.constexpr("griddepcontrol.wait; // for $0, which is nothing")
PREFETCH = tl.constexpr("cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;")
LAUNCH_DEPENDENTS = tl.constexpr("griddepcontrol.launch_dependents; // for $0, which is nothing")


@triton.jit
def wait(PDL: tl.constexpr):
    """Wait until every launch before this one is done, then let the next one start once all CTAs are here. Nothing
    without PDL."""
    wait_only(PDL)
    if PDL:
        tl.inline_asm_elementwise(LAUNCH_DEPENDENTS, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def wait_only(PDL: tl.constexpr):
    """``wait`` of a launch that fills the machine: the next one's CTAs would pile up on the SMs that empty first, so
    they start when this one ends."""
    if PDL:
        tl.inline_asm_elementwise(WAIT, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def wait_last(PDL: tl.constexpr):
    """``wait`` of a small launch before a large one, whose CTAs may come to the SMs at once and wait there: they wait
    for this one, and so for all before it."""
    if PDL:
        tl.inline_asm_elementwise(LAUNCH_DEPENDENTS, "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    wait_only(PDL)


@triton.jit
def prefetch(pointers, nbytes, PDL: tl.constexpr):
    """Bring ``nbytes``, a multiple of 16, from each of ``pointers`` on to the L2, from addresses that are multiples of
    16. It may stand before the wait, whoever writes there: it gives nothing to this launch. Nothing without PDL."""
    if PDL:
        tl.inline_asm_elementwise(
            PREFETCH, "=r,l,r", [pointers.to(tl.int64), tl.zeros_like(pointers.to(tl.int64)).to(tl.int32) + nbytes],
            dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


@triton.constexpr_function
def _claiming(registers):
    return f"setmaxnreg.dec.sync.aligned.u32 {registers}; // for $0, which is nothing"


@triton.jit
def claim_registers(REGISTERS: tl.constexpr):
    """Start with this many registers a thread, needed or not: a multiple of 8, and the launch's maxnreg. ptxas gives
    all of them to a kernel that might change their number, which limits how many CTAs share an SM. sm_90 only."""
    tl.inline_asm_elementwise(_claiming(REGISTERS), "=r", [], dtype=tl.int32, is_pure=False, pack=1)


def launched(target) -> dict[str, bool]:
    """The launch arguments of a kernel that waits, on ``target``."""
    return {"PDL": True, "launch_pdl": True} if target.has_pdl else {"PDL": False}
