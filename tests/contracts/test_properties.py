"""Hostile input to every operator: either refused by name before anything runs, or equal to the reference, with nothing
else touched.

SPARSE_ATTN_EXAMPLES=1000 tries that many new examples of each property; without it a few, the same ones in every run.
"""

from __future__ import annotations

import inspect

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.hostile import Call, assert_same, hostile, pieces
from support.hostile_cases import CASES, FUNCTIONS, calls, expected, is_defined

from sparse_attn import workspace
from sparse_attn.ops.layers.sampling import sample

WITH_KERNELS = [name for name in CASES if "impl" in inspect.signature(FUNCTIONS[name]).parameters
                and name not in ("hash_routed_experts", "build_window_plan")]  # fmt: skip
DTYPES = (
    torch.int32, torch.int64, torch.uint8, torch.bool, torch.bfloat16, torch.float16, torch.float32, torch.float64,
    torch.float8_e4m3fn, torch.complex64,
)  # fmt: skip


def impl_of(name: str, impl: str) -> str | None:
    return impl if "impl" in inspect.signature(FUNCTIONS[name]).parameters else None


def assert_untouched(after: Call, before: Call) -> None:
    """Nothing but what the call may write has changed."""
    for name, tensor in before.tensors().items():
        if name.split(".")[0] not in before.writes and tensor.device.type != "meta":
            mine, theirs = (torch.empty(0, dtype=torch.uint8).set_(call.tensors()[name].untyped_storage().cpu())
                            for call in (after, before))  # fmt: skip
            assert torch.equal(mine, theirs), f"{name} was written"


def assert_memory(got: Call, want: Call) -> None:
    """All memory that calls may write is alike, canaries included."""
    for name in want.writes:
        tensor = want.arguments[name]
        if want.level is None or tensor.dtype == torch.uint8:
            assert torch.equal(got.memory(name), want.memory(name)), f"{name}: {tensor.dtype} bytes differ"
        else:
            mine, theirs = (call.memory(name).view(tensor.dtype) for call in (got, want))
            assert_same(mine, theirs, want.level)


def test_every_public_function_is_here():
    ops = {name for name, value in FUNCTIONS.items() if "impl" in inspect.signature(value).parameters}
    assert len(ops) > 30 and ops <= CASES.keys()
    assert "hadamard_transform" in CASES


@pytest.mark.parametrize("name", CASES)
def test_reference_equals_plain_python(name):
    @hostile(12)
    @given(calls(name))
    def check(call):
        mine, theirs = call.fresh(), call.fresh()
        got, want = mine.run(impl_of(name, "reference")), expected(theirs)
        if want is not None or not pieces(got):
            assert_same(got, want, call.level)
        assert_untouched(mine, call)
        assert_memory(mine, theirs)
        assert_fresh(got, mine)

    check()


def assert_fresh(result, call: Call) -> None:
    """No output shares memory with an input, except what a plan passes on."""
    passed_on = ("build_step_plan",)
    given = {tensor.untyped_storage().data_ptr() for tensor in call.tensors().values() if tensor.numel()}
    if call.function.__name__ not in passed_on:
        for piece in pieces(result):
            assert not piece.numel() or piece.untyped_storage().data_ptr() not in given, "an output aliases an input"


@pytest.mark.kernel
@pytest.mark.parametrize("name", WITH_KERNELS)
def test_kernel_equals_reference(name, device):
    owner = workspace.Workspace((1 << 20, 1 << 10), device)

    @hostile(8)
    @given(calls(name))
    def check(call):
        owner._scratch.fill_(0xFF)
        mine, theirs = call.fresh(device), call.fresh()
        with workspace.use(owner):
            got = mine.run("triton")
        assert_same(got, theirs.run("reference"), call.loose or call.level)
        assert not owner._counters.any(), "counters were left"
        assert_untouched(mine, call)
        assert_memory(mine, theirs)

    check()


@st.composite
def spoilt(draw, name):
    """(name of a tensor argument, the call with that tensor of another kind, shape, stride or device)."""
    call = draw(calls(name))
    which = draw(st.sampled_from(sorted(call.tensors())))
    tensor = call.tensors()[which]
    how = draw(st.sampled_from(("dtype", "rank", "size", "stride", "device", "kind")))
    if how == "dtype":
        tensor = torch.zeros(
            tensor.shape, dtype=draw(st.sampled_from([dtype for dtype in DTYPES if dtype != tensor.dtype]))
        )
    elif how == "rank":
        tensor = draw(
            st.sampled_from((tensor.unsqueeze(0), tensor.flatten(), tensor.unsqueeze(-1), tensor.new_zeros(())))
        )
    elif how == "size" and tensor.dim():
        at = draw(st.integers(0, tensor.dim() - 1))
        size = max(tensor.shape[at] + draw(st.sampled_from((-1, 1, 7, -100))), 0)
        tensor = tensor.new_zeros([size if d == at else n for d, n in enumerate(tensor.shape)])
    elif how == "stride":
        wide = torch.zeros(*tensor.shape, 2, dtype=tensor.dtype)
        wide[..., 0] = tensor
        transposed = tensor.transpose(0, -1).contiguous().transpose(0, -1) if tensor.dim() > 1 else tensor
        tensor = draw(
            st.sampled_from((wide[..., 0], transposed, tensor[:1].expand_as(tensor) if tensor.dim() else tensor))
        )
    elif how == "device":
        tensor = torch.zeros(tensor.shape, dtype=tensor.dtype, device="meta")
    elif how == "kind":
        tensor = draw(st.sampled_from(("text", 3, [1])))
    return which, call.replaced(which, tensor)


def outcome(call: Call, impl: str | None):
    """The result, or the error with which a call was refused: one that names an argument."""
    try:
        return call.run(impl)
    except (TypeError, ValueError) as error:
        subject = str(error).split(":")[0].split(".")[0].split()[0]
        assert subject in inspect.signature(call.function).parameters, error
        return error


@pytest.mark.parametrize("name", CASES)
def test_what_does_not_fit_is_refused_by_name(name):
    @hostile(25)
    @given(spoilt(name))
    def check(case):
        which, call = case
        mine, again = call.fresh(), call.fresh()
        got = outcome(mine, impl_of(name, "reference"))
        assert_untouched(mine, call)
        if isinstance(got, Exception):
            for name_of in call.writes:
                if isinstance(call.arguments[name_of], torch.Tensor) and call.arguments[name_of].device.type != "meta":
                    assert torch.equal(mine.memory(name_of), call.memory(name_of)), "refused, and yet written"
            return
        # What is taken is meant as it stands: the same values in memory of their own give the same.
        tensor = again.tensors().get(which)
        if tensor is None or tensor.device.type == "meta":
            return
        if which not in call.writes:
            again = again.replaced(which, tensor.clone(memory_format=torch.contiguous_format))
        assert_same(got, again.run(impl_of(name, "reference")), None)

    check()


@pytest.mark.kernel
@pytest.mark.parametrize("name", WITH_KERNELS)
def test_kernels_refuse_what_the_reference_does(name, device):
    @hostile(15)
    @given(spoilt(name))
    def check(case):
        which, call = case
        mine, theirs = call.fresh(device), call.fresh()
        got, want = outcome(mine, "triton"), outcome(theirs, "reference")
        if isinstance(got, Exception) or isinstance(want, Exception):
            assert isinstance(got, type(want)), (got, want)
            return
        if any(piece.device.type == "meta" for piece in pieces(got)):
            return
        if is_defined(call):
            assert_same(got, want, call.loose or call.level)
        assert_untouched(mine, call)
        # Zeros for slots name one slot many times, and rows that were to go nowhere hold NaN: any bytes may win.
        if which != "slot_mapping":
            assert_memory(mine, theirs)

    check()


@hostile(20)
@given(st.data())
def test_samples(data):
    """A draw depends on its own row alone, and is never what cannot be drawn."""
    from support.hostile import INF, floats, some

    rows, vocab = some(data.draw, 0, 4), some(data.draw, 1, 9)
    logits = floats(data.draw, (rows, vocab), spoilt=(float("nan"), -INF))
    positions = torch.tensor(
        data.draw(st.lists(st.integers(-(2**63), 2**63 - 1), min_size=rows, max_size=rows)), dtype=torch.int64
    )
    for temperature in (0.0, 0.7):
        drawn = sample(logits, positions, temperature=temperature, seed=data.draw(st.integers(-(2**63), 2**63 - 1)))
        assert drawn.shape == (rows,) and drawn.dtype == torch.int64
        for row, token in enumerate(drawn.tolist()):
            line = [x if x == x else -INF for x in logits[row].tolist()]
            if max(line) == -INF:
                assert token == 0
            else:
                assert line[token] > -INF
                assert temperature or token == line.index(max(line))
