"""What lies between and behind two grouped products: gates times ups, and a token's weighted sum."""

import triton
import triton.language as tl

from sparse_attn.device import cast, pdl


@triton.jit
def gated(gate, up, clamp, CLAMPED: tl.constexpr):
    """silu(gate) * up in fp32. clamp: gates are bounded from above, ups both ways; NaN stays."""
    if CLAMPED:
        gate = tl.where(gate > clamp, clamp, gate)
        up = tl.where(up > clamp, clamp, tl.where(up < -clamp, -clamp, up))
    return gate / (1.0 + tl.exp(-gate)) * up


@triton.jit(do_not_specialize=["clamp"])
def gate_rows(
    both,  # [rows, 2 * intermediate], contiguous, gates first
    out,  # [rows, intermediate], contiguous
    intermediate,
    clamp,
    CLAMPED: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait(PDL)
    row, at = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < intermediate
    source = both + row * 2 * intermediate + at
    gate = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(source + intermediate, mask=inside, other=0.0).to(tl.float32)
    to = out + row * intermediate + at
    tl.store(to, cast.cast(gated(gate, up, clamp, CLAMPED), out.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["k", "experts"])
def add_rows(
    terms,  # [tokens * k, hidden], contiguous, sorted by expert
    place,  # int64 [tokens * k]: where a token's i-th term lies
    weights,  # fp32 [tokens * k]
    ids,  # int32 [tokens * k]
    out,  # [tokens, hidden], contiguous
    k,
    experts,
    hidden,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    pdl.wait(PDL)
    token, at = tl.program_id(0), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < hidden
    sums = tl.zeros([BLOCK], tl.float32)
    for i in range(k):
        row = token * k + i
        expert = tl.load(ids + row)
        there = (expert >= 0) & (expert < experts)  # nobody writes the others' terms
        term = tl.load(terms + tl.load(place + row) * hidden + at, mask=inside & there, other=0.0)
        sums += term.to(tl.float32) * tl.where(there, tl.load(weights + row), 0.0)
    tl.store(out + token.to(tl.int64) * hidden + at, cast.cast(sums, out.dtype.element_ty), mask=inside)
