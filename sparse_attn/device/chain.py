"""Launches without a gap between them: one starts while the one in front of it ends (programmatic dependent launch).

A program that starts early has its scalars, its shared memory and its barriers ready when the data is. Until it has
waited it reads and writes nothing that other launches do. Every kernel that is launched so waits, so that once one has
waited, all launches before it are done.
"""

import triton
import triton.language as tl

WAIT = tl.constexpr("griddepcontrol.wait; // for $0, which is nothing")
START_NEXT = tl.constexpr("griddepcontrol.launch_dependents; // for $0, which is nothing")


@triton.jit
def wait(CHAINED: tl.constexpr):
    """Until every launch before this one is done; the next one may start once all programs are here. Nothing where
    launches are not CHAINED."""
    wait_only(CHAINED)
    if CHAINED:
        tl.inline_asm_elementwise(START_NEXT, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def wait_only(CHAINED: tl.constexpr):
    """The same in launches that fill the machine: programs of the next one would crowd where these leave room first, so
    they start when these end."""
    if CHAINED:
        tl.inline_asm_elementwise(WAIT, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.constexpr_function
def _claiming(registers):
    return f"setmaxnreg.dec.sync.aligned.u32 {registers}; // for $0, which is nothing"


@triton.jit
def claim_registers(REGISTERS: tl.constexpr):
    """Start with this many registers a thread, a multiple of 8 and the launch's maxnreg, needed or not: ptxas gives all
    of them to a kernel that might change their number. So many programs fit a multiprocessor, and no more. sm_90."""
    tl.inline_asm_elementwise(_claiming(REGISTERS), "=r", [], dtype=tl.int32, is_pure=False, pack=1)


def chained(target) -> dict[str, bool]:
    """What a kernel that waits is launched with on ``target``."""
    return {"CHAINED": True, "launch_pdl": True} if target.chains_launches else {"CHAINED": False}
