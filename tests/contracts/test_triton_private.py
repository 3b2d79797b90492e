"""triton_private.py: aggregates of a kernel, and what the interpreter is mended for."""

import pytest
import torch
import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from sparse_attn.device import order  # noqa: F401  (any kernel imports a file of device)
from sparse_attn.device.triton_private import aggregate
from sparse_attn.testing.aot import compile_kernel


@triton.jit
def keep_where(x, out, limit, SIZE: tl.constexpr):
    column = tl.arange(0, SIZE)
    wanted = (limit > 3) & (limit % 2 == 0)
    tl.store(out + column, tl.load(x + column, mask=(column < limit) & wanted, other=-1), mask=wanted & (column != 1))


@pytest.mark.kernel
def test_a_scalar_comparison_is_part_of_a_mask(device):
    x = torch.arange(8, device=device)
    for limit, want in ((6, [0, 9, 2, 3, 4, 5, -1, -1]), (5, [9] * 8), (2, [9] * 8)):
        out = torch.full_like(x, 9)
        keep_where[(1,)](x, out, limit, 8)
        assert out.tolist() == want


@aggregate
class Strides:
    step: gl.tensor | gl.constexpr
    column: gl.tensor | gl.constexpr


@aggregate
class Carried:
    out: gl.tensor
    nothing: gl.constexpr
    memory: gl.shared_memory_descriptor
    both: gl.tuple
    strides: Strides
    SIZE: gl.constexpr


@aggregate
class State:
    steps: gl.tensor
    values: gl.tensor


@gluon.jit
def advance(state, more):
    return State(steps=state.steps + more, values=state.values * 2.0)


@gluon.jit
def partition(carried, more: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    steps = 0
    state = State(steps=steps, values=carried.both[more].load(LAYOUT))
    for i in range(carried.strides.step):
        state = advance(state, more)
        if i == 3 and carried.nothing is None:
            state = advance(state, 2)
    column = gl.arange(0, carried.SIZE, layout=LAYOUT)
    gl.store(carried.out + column * carried.strides.column, state.values + state.steps)


@gluon.jit
def specialised(out, step, column, SIZE: gl.constexpr):
    LAYOUT: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    memory = gl.allocate_shared_memory(gl.float32, [SIZE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    memory.store(gl.zeros([SIZE], gl.float32, LAYOUT))
    both = (memory, memory)
    carried = Carried(out, None, memory, both, Strides(column=column, step=step), SIZE)
    gl.warp_specialize([(partition, (carried, 0)), (partition, (carried, 1))], [4], [80])


@pytest.mark.aot
@pytest.mark.parametrize("constants", [dict(SIZE=128), dict(SIZE=128, column=1)], ids=["stride", "stride of 1"])
def test_warps_that_specialise_carry_an_aggregate(constants):
    """Its constexprs stay constexprs, also a stride that Triton takes for one since it is 1; loops and branches carry
    it."""
    types = {name: kind for name, kind in dict(out="*fp32", step="i32", column="i32").items() if name not in constants}
    compiled = compile_kernel(specialised, types, constants, num_warps=4)
    assert compiled.threads == 256 and compiled.count("STG") >= 2


@pytest.mark.aot
def test_an_aggregate_is_of_its_fields():
    for wrong in (
        lambda: Strides(1),
        lambda: Strides(step=1),
        lambda: Strides(1, 2, 3),
        lambda: Strides(step=1, row=2),
    ):
        with pytest.raises(TypeError):
            wrong()
    assert Strides(1, column=2).column == 2 and Strides(column=2, step=1).step == 1


@triton.jit
def add_up(lengths, out):
    total = 0
    for step in range(tl.load(lengths), tl.load(lengths + 1)):
        total += step
    tl.store(out, total)


@pytest.mark.kernel
def test_a_loaded_scalar_bounds_a_loop(device):
    out = torch.zeros(1, dtype=torch.int32, device=device)
    add_up[(1,)](torch.tensor([3, 6], dtype=torch.int32, device=device), out)
    assert out.item() == 12
