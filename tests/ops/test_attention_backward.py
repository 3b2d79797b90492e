"""The gradients of sparse_attn_prefill and merge_attn_states, beside dense attention that autograd follows."""

import contextlib
import functools
import math

import pytest
import torch
from support.steps import fresh, no_more_compilations

from sparse_attn import Ragged, merge_attn_states, sparse_attn_prefill
from sparse_attn.ops.attention.sparse import launch

D_V, D_QK, SCALE = 12, 16, 0.4
INT_MAX = 2**31 - 1
WIDE = torch.float64


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


# A repeated key, holes, ids of no row, a row without keys, another of ids of no row, and a capacity beyond the last row.
LISTS = Ragged(ints(0, 2, 2, -1, 4, INT_MAX, 1, -7, 9, 3, 3, 0), ints(0, 3, 3, 7, 9, 10))
MORE = Ragged(ints(1, -1, 0, 2, 2, 5), ints(0, 1, 2, 2, 4, 5))
ROWS, MORE_ROWS, HEADS = 6, 3, 3


def drawn(*shape, dtype=WIDE, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=WIDE, generator=generator).to(dtype).requires_grad_()


def case(dtype=WIDE, tokens=5):
    wide = torch.promote_types(dtype, torch.float32)
    return (
        drawn(tokens, HEADS, D_QK, dtype=dtype, seed=1),
        drawn(ROWS, D_QK, dtype=dtype, seed=2),
        drawn(HEADS + 2, dtype=wide, seed=3),
    )


def dense(q, kv, ragged, sink, d_v=D_V, scale=SCALE):
    """(out, lse) by plain torch over a [tokens, rows] count of how often a row is named."""
    counts = torch.zeros(q.shape[0], kv.shape[0], dtype=q.dtype)
    for token in range(q.shape[0]):
        for place in ragged.indices[ragged.indptr[token] : ragged.indptr[token + 1]].tolist():
            if 0 <= place < kv.shape[0]:
                counts[token, place] += 1
    scores = torch.einsum("thd,kd->thk", q, kv) * scale + counts.log().unsqueeze(1)
    live = counts.sum(1) > 0
    scores = torch.where(live[:, None, None], scores, 0.0)
    lse = scores.logsumexp(-1)
    total = lse if sink is None else torch.logaddexp(lse, sink[: q.shape[1]].to(lse.dtype))
    out = torch.einsum("thk,kd->thd", (scores - total.unsqueeze(-1)).exp(), kv[:, :d_v])
    out = torch.where(live[:, None, None], out, 0.0)
    return out, torch.where(live[:, None], lse, 0.0)


def ours(q, kv, ragged, sink, **options):
    out, lse = sparse_attn_prefill(q, kv, ragged, scale=SCALE, d_v=D_V, sink=sink, **options)
    return out, torch.where(lse.isneginf(), 0.0, lse)


def gradients(attend, inputs, dtype=WIDE):
    """Of a weighted sum of out and lse, by inputs."""
    out, lse = attend()
    loss = (out.to(WIDE) * drawn(*out.shape, seed=7).detach()).sum() + (
        lse.to(WIDE) * drawn(*lse.shape, seed=8).detach()
    ).sum()
    return torch.autograd.grad(loss, inputs)


def error(got, want):
    return ((got.to(WIDE) - want).norm() / want.norm()).item()


@pytest.mark.parametrize("with_sink", [False, True])
@pytest.mark.parametrize("with_more", [False, True])
def test_gradcheck(with_sink, with_more):
    q, kv, sink = case()
    more = drawn(MORE_ROWS, D_QK, seed=4)

    def attend(q, kv, sink, more):
        options = dict(extra_kv=more, extra_ragged=MORE) if with_more else {}
        return ours(q, kv, LISTS, sink if with_sink else None, **options)

    assert torch.autograd.gradcheck(attend, (q, kv, sink, more))


@pytest.mark.parametrize("with_sink", [False, True])
def test_against_dense_autograd(with_sink):
    q, kv, sink = case()
    sink, inputs = (sink, (q, kv, sink)) if with_sink else (None, (q, kv))
    got = gradients(lambda: ours(q, kv, LISTS, sink), inputs)
    want = gradients(lambda: dense(q, kv, LISTS, sink), inputs)
    torch.testing.assert_close(got, want)
    assert not got[0][1].any() and not got[0][3].any()  # rows that name no key


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_errors_of_narrow_dtypes(dtype):
    """Beside float64, and beside what dense autograd makes of the same dtype."""
    heads, tokens, rows, k = 8, 40, 96, 33
    q = drawn(tokens, heads, 80, dtype=dtype, seed=1)
    kv, sink = drawn(rows, 80, dtype=dtype, seed=2), drawn(heads, dtype=torch.float32, seed=3)
    lists = torch.rand(tokens, rows, generator=torch.Generator().manual_seed(4)).argsort(1)[:, :k]
    ragged = Ragged(lists.flatten().int(), torch.arange(0, tokens * k + 1, k, dtype=torch.int32))

    def attend(function, to, **options):
        given = [one.detach().to(to).requires_grad_() for one in (q, kv)] + [
            sink.detach().to(options.pop("sink")).requires_grad_()
        ]
        return gradients(lambda: function(given[0], given[1], ragged, given[2]), given)

    run = functools.partial(sparse_attn_prefill, scale=0.1, d_v=64)
    got = attend(lambda q, kv, ragged, sink: run(q, kv, ragged, sink=sink), dtype, sink=torch.float32)
    want = attend(lambda *given: dense(*given, d_v=64, scale=0.1), WIDE, sink=WIDE)
    eager = attend(lambda *given: dense(*given, d_v=64, scale=0.1), dtype, sink=dtype)
    assert got[0].dtype == got[1].dtype == dtype and got[2].dtype == torch.float32
    for mine, right, theirs, most in zip(got, want, eager, (4e-3, 3.5e-3, 1e-2)):
        assert error(mine, right) <= max(1.3 * error(theirs, right), 3e-6) and error(mine, right) < most


def test_what_no_list_names_has_no_part():
    q, kv, sink = case(torch.float32)
    want = gradients(lambda: ours(q, kv, LISTS, sink), (q, kv, sink))
    with torch.no_grad():
        kv[5] = math.nan
    got = gradients(lambda: ours(q, kv, LISTS, sink), (q, kv, sink))
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert not got[1][5].any()


@pytest.mark.parametrize("sink", [-math.inf, math.inf])
def test_sinks_that_are_infinite(sink):
    q, kv, _ = case()
    at = torch.full((HEADS,), sink, dtype=WIDE, requires_grad=True)
    got = gradients(lambda: ours(q, kv, LISTS, at), (q, kv, at))
    if sink < 0:
        torch.testing.assert_close(got[:2], gradients(lambda: ours(q, kv, LISTS, None), (q, kv)))
    else:  # out is 0 then, and lse alone has a gradient
        only_lse = torch.autograd.grad((dense(q, kv, LISTS, None)[1] * drawn(5, HEADS, seed=8).detach()).sum(), (q, kv))
        torch.testing.assert_close(got[:2], only_lse)
    assert not got[2].any()


def test_a_nan_in_a_row_that_is_named():
    q, kv, _ = case(torch.float32)
    with torch.no_grad():
        q[2, 1] = math.nan
    dq, dkv = torch.autograd.grad(ours(q, kv, LISTS, None)[0].sum(), (q, kv))
    bad = torch.zeros(5, HEADS, dtype=torch.bool)
    bad[2, 1] = True
    assert (dq.isnan().all(-1) == bad).all() and (dq.isnan().any(-1) == bad).all()
    assert dkv.isnan().any(1).tolist() == [False, True, False, False, True, False]  # keys 4 and 1


@pytest.mark.parametrize("strides", ["expanded", "transposed", "reversed"])
def test_strides_of_what_arrives(strides):
    q, kv, sink = case()
    out, lse = sparse_attn_prefill(q, kv, LISTS, scale=SCALE, d_v=D_V, sink=sink)
    arrives = dict(
        expanded=torch.ones((), dtype=WIDE).expand(out.shape),
        transposed=drawn(HEADS, 5, D_V, seed=5).detach().transpose(0, 1),
        reversed=drawn(5, HEADS, 2 * D_V, seed=5).detach()[..., ::2],
    )[strides]
    got = torch.autograd.grad(out, (q, kv, sink), arrives, retain_graph=True)
    want = torch.autograd.grad(out, (q, kv, sink), arrives.contiguous())
    torch.testing.assert_close(got, want, rtol=0, atol=0)


@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (0, 2)])
def test_only_what_is_wanted(wanted):
    given = [one.detach() for one in case()]
    whole = [one.clone().requires_grad_() for one in given]
    want = gradients(lambda: ours(whole[0], whole[1], LISTS, whole[2]), whole)
    part = [one.clone().requires_grad_(place in wanted) for place, one in enumerate(given)]
    got = gradients(lambda: ours(part[0], part[1], LISTS, part[2]), [part[place] for place in wanted])
    torch.testing.assert_close(got, tuple(want[place] for place in wanted), rtol=0, atol=0)


def test_rows_of_one_head():
    q, kv, sink = case()
    got = gradients(lambda: ours(q, kv.unsqueeze(1), LISTS, sink), (q, kv, sink))
    torch.testing.assert_close(got, gradients(lambda: ours(q, kv, LISTS, sink), (q, kv, sink)), rtol=0, atol=0)
    assert not got[2][HEADS:].any()  # a sink longer than the heads


def test_nothing_is_there():
    q, kv, sink = drawn(0, HEADS, D_QK), drawn(0, D_QK), drawn(HEADS)
    out, _ = sparse_attn_prefill(q, kv, Ragged(ints(), ints(0)), scale=SCALE, d_v=D_V, sink=sink)
    assert [one.shape for one in torch.autograd.grad(out.sum(), (q, kv, sink))] == [q.shape, kv.shape, sink.shape]


def test_bits_do_not_depend_on_rows_beside():
    """A document alone, and behind another one in the same call."""
    q, kv, sink = case(torch.bfloat16)
    alone = torch.autograd.grad(ours(q, kv, LISTS, sink)[0].sum(), (q, kv))
    twice, both = (torch.cat([one, one]).detach().requires_grad_() for one in (q, kv))
    live = int(LISTS.indptr[-1])
    shifted = torch.where((LISTS.indices >= 0) & (LISTS.indices < ROWS), LISTS.indices + ROWS, -1)
    packed = Ragged(
        torch.cat([torch.where(LISTS.indices < ROWS, LISTS.indices, -1)[:live], shifted]),
        torch.cat([LISTS.indptr, LISTS.indptr[1:] + live]),
    )
    for _ in range(3):
        dq, dkv = torch.autograd.grad(ours(twice, both, packed, sink)[0].sum(), (twice, both))
        assert torch.equal(dq[5:], alone[0]) and torch.equal(dkv[ROWS:], alone[1])


def test_two_lists_are_one_softmax():
    q, kv, sink = case()
    more = drawn(MORE_ROWS, D_QK, seed=4)
    joined = [
        [*(i if 0 <= i < ROWS else -1 for i in LISTS.indices[LISTS.indptr[t] : LISTS.indptr[t + 1]].tolist()),
         *(i + ROWS if 0 <= i < MORE_ROWS else -1 for i in MORE.indices[MORE.indptr[t] : MORE.indptr[t + 1]].tolist())]
        for t in range(5)
    ]  # fmt: skip
    lists = Ragged(ints(*sum(joined, [])), torch.tensor([0, *map(len, joined)]).cumsum(0).int())
    got = gradients(lambda: ours(q, kv, LISTS, sink, extra_kv=more, extra_ragged=MORE), (q, kv, more, sink))
    want = gradients(lambda: dense(q, torch.cat([kv, more]), lists, sink), (q, kv, more, sink))
    torch.testing.assert_close(got, want)


@pytest.mark.parametrize("missing", ["extra_kv", "extra_ragged"])
def test_a_second_list_is_whole(missing):
    q, kv, _ = case()
    given = dict(extra_kv=drawn(MORE_ROWS, D_QK), extra_ragged=MORE) | {missing: None}
    with pytest.raises(ValueError, match=f"^{missing}: got None, allowed: both of extra_kv, extra_ragged, or none"):
        ours(q, kv, LISTS, None, **given)


def test_halves_merged_are_the_whole():
    """What context-parallel training does."""
    q, kv, sink = case(torch.float32)
    halves = [
        Ragged(torch.where((LISTS.indices < ROWS) & (LISTS.indices % 2 == parity), LISTS.indices, -1), LISTS.indptr)
        for parity in (0, 1)
    ]

    def merged():
        parts = [sparse_attn_prefill(q, kv, half, scale=SCALE, d_v=D_V) for half in halves]
        out, lse = merge_attn_states(*(torch.stack(one) for one in zip(*parts)), sink=sink)
        return out, torch.where(lse.isneginf(), 0.0, lse)

    got = gradients(merged, (q, kv, sink))
    torch.testing.assert_close(got, gradients(lambda: ours(q, kv, LISTS, sink), (q, kv, sink)), rtol=1e-5, atol=1e-5)


def test_states_of_no_key_have_no_part():
    outs, lses = drawn(2, 2, 1, 4, dtype=torch.float32), drawn(2, 2, 1, dtype=torch.float32, seed=1)
    with torch.no_grad():
        lses[0, 0], lses[:, 1], outs[0, 0], outs[:, 1] = -math.inf, -math.inf, math.nan, math.nan
    out, lse = merge_attn_states(outs, lses, sink=torch.zeros(1))
    douts, dlses = torch.autograd.grad(out.sum() + lse[0].sum(), (outs, lses))
    assert not douts[0, 0].any() and not douts[:, 1].any() and not dlses[:, 1].any() and dlses[1, 0].item() != 0


def test_opcheck():
    q, kv, sink = case(torch.float32)
    given = q, kv, *LISTS, SCALE, D_V, sink, False, "auto"
    torch.library.opcheck(torch.ops.sparse_attn.sparse_attn_prefill.default, given)
    out, lse = (one.detach() for one in torch.ops.sparse_attn.sparse_attn_prefill(*given))
    saved = [one.detach() for one in (q, kv, *LISTS)]
    given = *saved, out, lse, out, None, sink.detach(), SCALE, D_V, True, False, True, "auto"
    torch.library.opcheck(torch.ops.sparse_attn.sparse_attn_prefill_backward.default, given)
    states = drawn(2, 3, 2, 4, dtype=torch.float32), drawn(2, 3, 2, dtype=torch.float32), drawn(2, dtype=torch.float32)
    torch.library.opcheck(torch.ops.sparse_attn.merge_attn_states.default, (*states, "auto"))


@pytest.mark.parametrize("checkpoint", [False, True])
def test_compiled_forward_and_backward(checkpoint):
    fresh()

    def loss(q, kv, indices, indptr, sink):
        run = functools.partial(ours, ragged=Ragged(indices, indptr), sink=sink)
        out, lse = torch.utils.checkpoint.checkpoint(run, q, kv, use_reentrant=False) if checkpoint else run(q, kv)
        return out.square().sum() + lse.sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (2, 65, 3, 16, 64, 300):  # 3 is how many heads there are, and 16 how wide keys are
        q, kv, sink = drawn(tokens, HEADS, D_QK), drawn(2 * tokens, D_QK, seed=1), drawn(HEADS, seed=2)
        lists = torch.arange(3 * tokens, dtype=torch.int32) % (2 * tokens)
        given = q, kv, lists, torch.arange(0, 3 * tokens + 1, 3, dtype=torch.int32), sink
        with no_more_compilations() if tokens in (3, 16, 64, 300) else contextlib.nullcontext():
            got = torch.autograd.grad(compiled(*given), (q, kv, sink))
        torch.testing.assert_close(got, torch.autograd.grad(loss(*given), (q, kv, sink)))


def test_what_has_no_gradient_says_so():
    q, kv, _ = case()
    first = torch.autograd.grad(ours(q, kv, LISTS, None)[0].sum(), q, create_graph=True)[0]
    with pytest.raises(NotImplementedError, match="^sparse_attn::sparse_attn_prefill_backward has no backward"):
        first.sum().backward()
    with pytest.raises(NotImplementedError, match="has no backward on a GPU: run it with impl='reference'"):
        launch.sparse_attn_prefill_backward(*[None] * 14)
    with pytest.raises(TypeError, match="^q: got torch.float64, allowed: .* for a kernel"):
        launch.sparse_attn_prefill(q, case()[1], *LISTS, SCALE, D_V, None)


def test_deterministic_algorithms_change_nothing():
    q, kv, sink = case()
    want = gradients(lambda: ours(q, kv, LISTS, sink), (q, kv, sink))
    torch.use_deterministic_algorithms(True)
    try:
        got = gradients(lambda: ours(q, kv, LISTS, sink), (q, kv, sink))
    finally:
        torch.use_deterministic_algorithms(False)
    torch.testing.assert_close(got, want, rtol=0, atol=0)
