"""Window, entry and combined indices: plain Python, the reference, the kernel, and the field's formulas."""

import pytest
import torch
from expecttest import assert_expected_inline
from support.extremes import INT_MAX, INT_MIN

from sparse_attn.ops.ragged.lists import combine_topk_swa_indices_ragged, entry_indices, window_indices
from sparse_attn.testing.ops import opcheck, schema


def ints(values, device="cpu"):
    """int32, every other element of a longer tensor."""
    wide = torch.full((2 * len(values),), INT_MAX, dtype=torch.int32)
    wide[::2] = torch.tensor(values, dtype=torch.int32)
    return wide.to(device)[::2]


def rows_of(ragged):
    starts = ragged.indptr.tolist()
    assert (ragged.indices[starts[-1] :] == -1).all()
    return [ragged.indices[a:b].tolist() for a, b in zip(starts, starts[1:])]


def named(slots):
    """Those that int32 can name."""
    return [slot for slot in slots if 0 <= slot < INT_MAX]


def slow_window(positions, requests, table, block_size, window):
    out = []
    for p, b in zip(positions, requests):
        row = []
        if p >= 0 and 0 <= b < len(table):
            for q in range(max(p - window + 1, 0), p + 1):
                block = table[b][q // block_size % len(table[b])]
                row += [block * block_size + q % block_size] * (block >= 0)
        out.append(named(row))
    return out


def slow_entries(limits, requests, table, block_size, most):
    out = []
    for limit, b in zip(limits, requests):
        row = []
        if 0 <= b < len(table):
            for e in range(min(limit, most)):
                if e // block_size < len(table[b]) and table[b][e // block_size] >= 0:
                    row.append(table[b][e // block_size] * block_size + e % block_size)
        out.append(named(row))
    return out


def slow_combine(topk, limits, positions, entry_offsets, window_offsets, window, most, num_rows):
    out = []
    for t, p in enumerate(positions):
        row = []
        if p >= 0:
            chosen = range(most) if topk is None else topk[t]
            row = [e + entry_offsets[t] for e in chosen if 0 <= e < limits[t]]
            row += [q + window_offsets[t] for q in range(max(p - window + 1, 0), p + 1)]
        out.append([x for x in row if 0 <= x < num_rows])
    return out


def slow_formulas(fed, topk, ratio, top_k, window, n, m):
    """vLLM's combine_topk_swa, term by term. fed: (length, new tokens) of the requests of a chunk."""
    out = []
    for b, (length, q) in enumerate(fed):
        gather_start = length - (q + min(length - q, window - 1))
        for pos in range(length - q, length):
            topk_len, swa_len = min((pos + 1) // ratio, top_k), min(pos + 1, window)
            row = [e + m * b for e in topk[len(out)][:topk_len] if e >= 0]
            out.append(row + [m * b + n + (pos - swa_len + 1 + s) - gather_start for s in range(swa_len)])
    return out


POSITIONS = [0, 3, 4, 17, 40, -1, INT_MIN, 9, 11, INT_MAX, 30, 30, 30]
REQUESTS = [0, 1, 1, 0, 1, 0, 1, -1, INT_MIN, 1, 2, INT_MAX, 4]
LIMITS = [0, 1, 5, 100, -3, INT_MIN, 6, 2, INT_MAX, 4, 8, 5, 9]
RING = [[4, 2], [0, 5], [-1, 3], [INT_MIN, INT_MAX]]
PAGED = [[4, -1, 7], [0, 5, 3], [2**29, INT_MAX, 6], [INT_MIN, 1, 2]]  # 2**29 blocks of 8 are 2**32 slots


def check_windows(impl, device):
    table = torch.tensor([row + [INT_MAX] for row in RING], dtype=torch.int32, device=device)[:, :2]
    for block_size, window in ((8, 5), (8, 16), (3, 1), (2, 4), (16, 20)):
        got = window_indices(ints(POSITIONS, device), ints(REQUESTS, device), table, block_size, window, impl=impl)
        assert got.indices.shape == (len(POSITIONS) * window,)
        assert rows_of(got) == slow_window(POSITIONS, REQUESTS, RING, block_size, window)
    for empty in (table[:0], table[:, :0]):
        got = window_indices(ints(POSITIONS, device), ints(REQUESTS, device), empty, 8, 5, impl=impl)
        assert rows_of(got) == [[]] * len(POSITIONS)
    assert rows_of(window_indices(ints([], device), ints([], device), table, 8, 5, impl=impl)) == []


def check_entries(impl, device):
    table = torch.tensor(PAGED, dtype=torch.int32, device=device)
    for block_size, most in ((2, 6), (2, 3), (4, 40), (8, 20), (1, 0)):
        got = entry_indices(ints(LIMITS, device), ints(REQUESTS, device), table, block_size, most, impl=impl)
        assert got.indices.shape == (len(LIMITS) * most,)
        assert rows_of(got) == slow_entries(LIMITS, REQUESTS, PAGED, block_size, most)
    assert rows_of(entry_indices(ints([], device), ints([], device), table, 8, 5, impl=impl)) == []
    assert rows_of(entry_indices(ints([3], device), ints([0], device), table[:, :0], 8, 5, impl=impl)) == [[]]


def check_combined(impl, device):
    generator = torch.Generator().manual_seed(1)
    rows = len(POSITIONS)
    topk = torch.randint(-2, 12, (rows, 7), generator=generator, dtype=torch.int32)
    topk[3] = torch.tensor([INT_MIN, INT_MAX, 0, -1, 11, 1, 2])
    topk[8, :3] = torch.tensor([INT_MAX, INT_MAX - 1, 3])
    entry_offsets = [0, 0, 50, 50, -5, 3, 3, INT_MAX, 5 - INT_MAX, 0, INT_MIN, 9, 1]
    window_offsets = [20, -2, 30, -8, -30, 0, 0, 5, INT_MIN, 9 - INT_MAX, 0, INT_MAX, -27]
    arguments = LIMITS, POSITIONS, entry_offsets, window_offsets
    for dense in (topk, None):
        for window, most, num_rows in ((5, 4, 60), (1, 0, 60), (16, 9, 25), (3, 2, 0)):
            got = combine_topk_swa_indices_ragged(
                None if dense is None else dense.T.contiguous().T.to(device), *(ints(a, device) for a in arguments),
                window=window, max_entries=most, num_rows=num_rows, impl=impl,
            )  # fmt: skip
            assert got.indices.shape == (rows * ((7 if dense is not None else most) + window),)
            listed = None if dense is None else dense.tolist()
            assert rows_of(got) == slow_combine(listed, *arguments, window, most, num_rows)
    none = ints([], device)
    for dense in (topk[:0].to(device), None):
        got = combine_topk_swa_indices_ragged(
            dense, none, none, none, none, window=3, max_entries=2, num_rows=9, impl=impl
        )
        assert rows_of(got) == []


def check_formulas(impl, device):
    """A chunk of requests whose gathered keys lie in one matrix [requests, n entries + window + tokens]."""
    generator = torch.Generator().manual_seed(3)
    for fed in ([(9, 2), (6, 6)], [(1, 1), (23, 4), (40, 1), (8, 7)]):
        for ratio, top_k, window, listed in ((4, 5, 4, True), (4, 2, 6, True), (16, 3, 5, False), (1, 0, 8, False)):
            n = -(-48 // ratio) if top_k else 0  # the longest request that may come has 48 tokens
            m = n + window + sum(q for _, q in fed)
            place = [(b, p, length, q) for b, (length, q) in enumerate(fed) for p in range(length - q, length)]
            limits = [(p + 1) // ratio for _, p, _, _ in place]
            topk = [torch.randperm(limit, generator=generator).tolist()[:top_k] for limit in limits]
            topk = [row + [-1] * (top_k - len(row)) for row in topk] if listed else [list(range(top_k))] * len(place)
            if listed:
                topk[-1][0] = -1  # the indexer found one fewer
            got = combine_topk_swa_indices_ragged(
                torch.tensor(topk, dtype=torch.int32, device=device) if listed else None,
                ints(limits, device), ints([p for _, p, _, _ in place], device),
                ints([m * b for b, _, _, _ in place], device),
                ints([m * b + n - (length - q - min(length - q, window - 1)) for b, _, length, q in place], device),
                window=window, max_entries=top_k, num_rows=m * len(fed), impl=impl,
            )  # fmt: skip
            assert rows_of(got) == slow_formulas(fed, topk, ratio, top_k, window, n, m)


@pytest.mark.parametrize("check", [check_windows, check_entries, check_combined, check_formulas])
def test_reference(check):
    check("reference", "cpu")


@pytest.mark.kernel
@pytest.mark.parametrize("check", [check_windows, check_entries, check_combined, check_formulas])
def test_kernel(check, device, dirty_workspace):
    check("triton", device)


@pytest.mark.gpu
def test_kernel_at_size():
    generator = torch.Generator().manual_seed(2)
    positions = torch.randint(-1, 9000, (5000,), generator=generator, dtype=torch.int32)
    requests = torch.randint(-1, 8, (5000,), generator=generator, dtype=torch.int32)
    table = torch.randperm(8 * 40, generator=generator).int().view(8, 40)
    topk = torch.randint(-1, 2300, (5000, 512), generator=generator, dtype=torch.int32)
    offsets = [torch.randint(-200, 9000, (5000,), generator=generator, dtype=torch.int32) for _ in range(2)]
    for op, arguments in (
        (window_indices, (positions, requests, table, 64, 128)),
        (entry_indices, (positions // 128, requests, table, 2, 70)),
        (combine_topk_swa_indices_ragged, (topk, positions // 4, positions, *offsets)),
    ):
        options = dict(window=128, max_entries=0, num_rows=8000) if op is combine_topk_swa_indices_ragged else {}
        want = op(*arguments, **options, impl="reference")
        on_gpu = [value.cuda() if isinstance(value, torch.Tensor) else value for value in arguments]
        got = op(*on_gpu, **options, impl="triton")
        assert torch.equal(got.indices.cpu(), want.indices) and torch.equal(got.indptr.cpu(), want.indptr)


def test_combined_table():
    """Two requests of a chunk, ratio 4, window 4, gathered into one matrix: N = 4 rows of entries and 6 of window keys
    each (M = 10). The first has 9 tokens of which this step feeds 2; the second has 6 and feeds all."""
    ratio, window, n, m = 4, 4, 4, 10
    shown, topk, limits, positions, entry_offsets, window_offsets = [], [], [], [], [], []
    for b, (length, fed) in enumerate(((9, 2), (6, 6))):
        gather_start = length - (fed + min(length - fed, window - 1))
        for p in range(length - fed, length):
            topk.append([e if e < (p + 1) // ratio else -1 for e in (1, 0)])
            limits.append((p + 1) // ratio)
            positions.append(p)
            entry_offsets.append(m * b)
            window_offsets.append(m * b + n - gather_start)
    ragged = combine_topk_swa_indices_ragged(
        torch.tensor(topk, dtype=torch.int32), ints(limits), ints(positions), ints(entry_offsets), ints(window_offsets),
        window=window, max_entries=0, num_rows=2 * m,
    )  # fmt: skip
    for p, chosen, row in zip(positions, topk, rows_of(ragged)):
        shown.append(f"position {p}, entries {chosen}: {row}")
    assert_expected_inline(
        "\n".join(shown),
        """\
position 7, entries [1, 0]: [1, 0, 4, 5, 6, 7]
position 8, entries [1, 0]: [1, 0, 5, 6, 7, 8]
position 0, entries [-1, -1]: [14]
position 1, entries [-1, -1]: [14, 15]
position 2, entries [-1, -1]: [14, 15, 16]
position 3, entries [-1, 0]: [10, 14, 15, 16, 17]
position 4, entries [-1, 0]: [10, 15, 16, 17, 18]
position 5, entries [-1, 0]: [10, 16, 17, 18, 19]""",
    )


def test_schemas():
    names = ("window_indices", "entry_indices", "combine_topk_swa_indices_ragged")
    assert_expected_inline(
        "\n".join(schema(name) for name in names),
        """\
sparse_attn::window_indices(Tensor positions, Tensor request_ids, Tensor block_table, SymInt block_size, int window, str impl) -> (Tensor, Tensor)
sparse_attn::entry_indices(Tensor limits, Tensor request_ids, Tensor block_table, SymInt block_size, SymInt max_entries, str impl) -> (Tensor, Tensor)
sparse_attn::combine_topk_swa_indices_ragged(Tensor? topk, Tensor limits, Tensor positions, Tensor entry_offsets, Tensor window_offsets, int window, SymInt max_entries, SymInt num_rows, str impl) -> (Tensor, Tensor)""",  # noqa: E501
    )


def check_opcheck(impl, device):
    table = torch.tensor(PAGED, dtype=torch.int32, device=device)
    five = torch.arange(5, dtype=torch.int32, device=device)
    zero = torch.zeros_like(five)
    topk = torch.zeros(5, 3, dtype=torch.int32, device=device)
    opcheck("window_indices", five, zero, table, 2, 3, impl)
    opcheck("entry_indices", five, zero, table, 2, 4, impl)
    opcheck("combine_topk_swa_indices_ragged", topk, five, five, zero, zero, 2, 0, 9, impl)
    opcheck("combine_topk_swa_indices_ragged", None, five, five, zero, zero, 2, 3, 9, impl)


def test_opcheck():
    check_opcheck("auto", "cpu")


@pytest.mark.kernel
def test_opcheck_kernel(device):
    check_opcheck("triton", device)


def test_traces_without_breaks_or_recompiles():
    def step(positions, requests, table, topk):
        window = window_indices(positions, requests, table, 2, 3)
        entries = entry_indices(positions, requests, table, 2, 4)
        both = combine_topk_swa_indices_ragged(
            topk, positions, positions, requests, requests, window=3, max_entries=0, num_rows=topk.shape[0] * 4
        )
        return *window, *entries, *both

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (3, 5, 9):
        positions = torch.arange(tokens, dtype=torch.int32)
        arguments = positions, positions % 2, torch.tensor(PAGED, dtype=torch.int32), positions.view(-1, 1).repeat(1, 4)
        with torch.compiler.set_stance("default" if tokens < 9 else "fail_on_recompile"):
            got = compiled(*arguments)
        assert all(map(torch.equal, got, step(*arguments)))


FIVE, TABLE = torch.zeros(5, dtype=torch.int32), torch.zeros(2, 3, dtype=torch.int32)
WINDOW = dict(positions=FIVE, request_ids=FIVE, block_table=TABLE, block_size=2, window=3)
ENTRY = dict(limits=FIVE, request_ids=FIVE, block_table=TABLE, block_size=2, max_entries=3)
COMBINE = dict(topk=TABLE.repeat(3, 1)[:5], limits=FIVE, positions=FIVE, entry_offsets=FIVE, window_offsets=FIVE,
               window=3, max_entries=0, num_rows=9)  # fmt: skip


@pytest.mark.parametrize(
    "function, given, change, error, message",
    [
        (window_indices, WINDOW, dict(positions=FIVE.long()), TypeError, "positions: got dtype int64"),
        (window_indices, WINDOW, dict(request_ids=FIVE[:2]), ValueError, "request_ids: got shape"),
        (window_indices, WINDOW, dict(block_table=FIVE), ValueError, "block_table: got 1 dimensions"),
        (window_indices, WINDOW, dict(block_table=TABLE.T.contiguous().T), ValueError, "block_table: got stride"),
        (window_indices, WINDOW, dict(block_table=TABLE.to("meta")), ValueError, "block_table: got device meta"),
        (window_indices, WINDOW, dict(block_size=0), ValueError, "block_size: got 0"),
        (window_indices, WINDOW, dict(window=0), ValueError, "window: got 0"),
        (window_indices, WINDOW, dict(window=2**30), ValueError, "window: got 5 rows of up to 1073741824 indices"),
        (window_indices, WINDOW, dict(impl="cuda"), ValueError, "impl: got 'cuda'"),
        (entry_indices, ENTRY, dict(limits=FIVE.float()), TypeError, "limits: got dtype float32"),
        (entry_indices, ENTRY, dict(max_entries=-1), ValueError, "max_entries: got -1"),
        (combine_topk_swa_indices_ragged, COMBINE, dict(topk=TABLE), ValueError, "topk: got shape"),
        (combine_topk_swa_indices_ragged, COMBINE, dict(topk=COMBINE["topk"].long()), TypeError, "topk: got dtype"),
        (combine_topk_swa_indices_ragged, COMBINE, dict(limits=FIVE[:2]), ValueError, "limits: got shape"),
        (combine_topk_swa_indices_ragged, COMBINE, dict(window_offsets=FIVE[:2]), ValueError, "window_offsets: got"),
        (combine_topk_swa_indices_ragged, COMBINE, dict(window=0), ValueError, "window: got 0"),
        (combine_topk_swa_indices_ragged, COMBINE, dict(num_rows=-1), ValueError, "num_rows: got -1"),
    ],
)
def test_errors(function, given, change, error, message):
    with pytest.raises(error, match=message):
        function(**given | change)
