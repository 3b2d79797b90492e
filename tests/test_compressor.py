"""The compressor: pooling against plain Python, every way to cut a sequence into steps, and the kernels."""

import math

import pytest
import torch
from conftest import big
from expecttest import assert_expected_inline

from sparse_attn.layout import IndexFp8Layout, PlainLayout, PlanarFp8Layout, allocate_cache
from sparse_attn.ops.compressor import compress_and_cache
from sparse_attn.ops.rope import rope_table
from sparse_attn.testing.ops import opcheck, schema

INT_MIN, INT_MAX = -(2**31), 2**31 - 1
PLAIN = PlainLayout("fp32", 32)
LAYOUTS = [
    PLAIN, PlainLayout("bf16", 20), PlanarFp8Layout(24, 8, group=8), PlanarFp8Layout(48, 16, 16, "e4m3fnuz"),
    IndexFp8Layout(32), IndexFp8Layout(32, "e4m3fnuz", "raw"),
]  # fmt: skip
FORMS = [(4, True), (8, False)]  # ratio, overlap


class World:
    """Sequences of known values, cut into steps at will. Caches and rings start as NaN, behind and in front of canaries."""

    def __init__(self, ratio, overlap, layout=PLAIN, *, lengths=(37, 21, 5), slack=0, device="cpu", impl="auto", seed=0):
        self.ratio, self.overlap, self.layout, self.device, self.impl = ratio, overlap, layout, device, impl
        generator = torch.Generator().manual_seed(seed)
        self.dim, self.parts = layout.dim, 2 if overlap else 1
        width = self.parts * self.dim
        self.kv = [torch.randn(length, width, generator=generator) for length in lengths]
        self.gate = [2 * torch.randn(length, width, generator=generator) for length in lengths]
        self.bias = torch.randn(ratio, width, generator=generator)
        self.norm = 1 + 0.2 * torch.randn(self.dim, generator=generator)
        rotated = 8
        self.table = rope_table(max(lengths), rotated, 100.0, device="cpu")
        self.options = dict(ratio=ratio, overlap=overlap, eps=1e-5, rope_start=self.dim - rotated, layout=layout)
        self.per_request = -(-max(lengths) // ratio)
        count = len(lengths)
        self.cache = allocate_cache(layout, count * self.per_request + 2, 1, device)
        self.cache.fill_(0xFF if self.cache.dtype == torch.uint8 else math.nan)
        ring = self.parts * ratio + slack
        self.memory = torch.full((count + 2, ring, 2 * width), math.nan, device=device)
        self.state = self.memory[1:-1]
        self.state_table = torch.arange(count - 1, -1, -1, dtype=torch.int32).unsqueeze(1)

    def slot(self, request, position):
        if (position + 1) % self.ratio:
            return -1
        return 1 + request * self.per_request + position // self.ratio

    def step(self, spans, *, padding=(), wrong=()):
        """spans: (request, start, stop) of each request. padding: rows put in front of these spans. wrong: (request,
        position) whose values are not the sequence's."""
        kv, gate, positions, requests, slots = [], [], [], [], []
        for number, (request, start, stop) in enumerate(spans):
            if number in padding:
                kv.append(torch.full((2, self.kv[0].shape[1]), math.nan))
                gate.append(kv[-1])
                positions += [-1, -1]
                requests += [-1, INT_MAX]
                slots += [0, INT_MIN]
            rows = torch.arange(start, stop)
            spoilt = torch.tensor([(request, p) in wrong for p in rows.tolist()]).unsqueeze(1)
            kv.append(self.kv[request][start:stop] + 9.0 * spoilt)
            gate.append(self.gate[request][start:stop] + 9.0 * spoilt)
            positions += rows.tolist()
            requests += [request] * len(rows)
            slots += [self.slot(request, p) for p in rows.tolist()]
        self.call(torch.cat(kv), torch.cat(gate), positions, requests, slots)

    def call(self, kv, gate, positions, requests, slots, **change):
        wide = torch.full((len(kv), kv.shape[1] + 3), math.nan)
        wide[:, : kv.shape[1]] = kv
        to = self.device
        compress_and_cache(
            wide.to(to)[:, : kv.shape[1]], gate.to(to), self.bias.to(to), self.norm.to(to),
            torch.tensor(positions, dtype=torch.int32, device=to), torch.tensor(requests, dtype=torch.int32, device=to),
            self.state, self.state_table.to(to), self.cache, torch.tensor(slots, dtype=torch.int64, device=to),
            self.table.to(to), **self.options | dict(impl=self.impl) | change,
        )  # fmt: skip

    def entries(self, request):
        """What is cached of a request's complete entries."""
        count = len(self.kv[request]) // self.ratio
        slots = torch.arange(count, device=self.device) + 1 + request * self.per_request
        return self.layout.decode(self.cache, slots).cpu()

    def wanted(self, request):
        """The same, fp32, in plain Python per channel."""
        rows = []
        for e in range(len(self.kv[request]) // self.ratio):
            values = []
            for d in range(self.dim):
                pooled = []
                for p in range(max(e - self.overlap, 0) * self.ratio, (e + 1) * self.ratio):
                    at = d + self.dim * (self.overlap and p >= e * self.ratio)
                    pooled.append((self.gate[request][p, at] + self.bias[p % self.ratio, at], self.kv[request][p, at]))
                top = max(gate for gate, _ in pooled)
                shares = [math.exp(gate - top) for gate, _ in pooled]
                values.append(sum(s * float(kv) for s, (_, kv) in zip(shares, pooled)) / sum(shares))
            row = torch.tensor(values, dtype=torch.float64)
            row = row / (row.pow(2).mean() + 1e-5).sqrt() * self.norm.double()
            cos, sin = self.table[e * self.ratio].double().chunk(2)
            a, b = row[-8:].unflatten(0, (4, 2)).unbind(1)
            row[-8:] = torch.stack([a * cos - b * sin, b * cos + a * sin], 1).flatten()
            rows.append(row)
        return torch.stack(rows).float()

    def check(self, request):
        got, want = self.entries(request), self.wanted(request)
        if isinstance(self.layout, PlainLayout):
            tolerance = dict(rtol=1e-5, atol=1e-5) if self.layout.dtype_name == "fp32" else dict(rtol=2**-7, atol=1e-4)
        else:  # half an fp8 step of values up to 4
            tolerance = dict(rtol=2**-4, atol=0.02)
        torch.testing.assert_close(got, want, **tolerance)

    def check_canaries(self):
        assert self.memory[[0, -1]].isnan().all()
        for edge in (self.cache[0], self.cache[-1]):
            assert (edge == 0xFF).all() if edge.dtype == torch.uint8 else edge.isnan().all()


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("ratio, overlap", FORMS)
def test_one_step(ratio, overlap, layout):
    world = World(ratio, overlap, layout)
    world.step([(r, 0, len(kv)) for r, kv in enumerate(world.kv)], padding=(1, 2))
    for request in range(2):
        world.check(request)
    world.check_canaries()


def cut(world, sizes):
    """Feed every sequence in turn by steps of ``sizes`` tokens, all requests in a step."""
    at = [0] * len(world.kv)
    for number in range(10**6):
        spans = []
        for request, kv in enumerate(world.kv):
            stop = min(at[request] + sizes[(number + request) % len(sizes)], len(kv))
            if stop > at[request]:
                spans.append((request, at[request], stop))
                at[request] = stop
        if not spans:
            return world
        world.step(spans, padding=(number % 3,))


@pytest.mark.parametrize("sizes", [(1,), (2,), (3,), (5, 1), (7, 2, 9), (16,)])
@pytest.mark.parametrize("ratio, overlap", FORMS)
def test_steps_make_no_difference(ratio, overlap, sizes):
    """Bit for bit, with rings as short as allowed."""
    whole, parts = cut(World(ratio, overlap), (64,)), cut(World(ratio, overlap), sizes)
    for request in range(2):
        assert torch.equal(whole.entries(request), parts.entries(request))
    parts.check_canaries()


@pytest.mark.parametrize("next_n", [2, 3, 4])
@pytest.mark.parametrize("ratio, overlap", FORMS)
def test_rejected_tokens_are_overwritten(ratio, overlap, next_n):
    world, whole = World(ratio, overlap, slack=next_n - 1), cut(World(ratio, overlap), (64,))
    generator = torch.Generator().manual_seed(next_n)
    at = [0] * 3
    while any(at[r] < len(kv) for r, kv in enumerate(world.kv)):
        spans = [(r, at[r], min(at[r] + next_n, len(kv))) for r, kv in enumerate(world.kv) if at[r] < len(kv)]
        wrong = set()
        for request, start, stop in spans:
            kept = int(torch.randint(1, stop - start + 1, (), generator=generator))
            wrong |= {(request, p) for p in range(start + kept, stop)}
            at[request] = start + kept
        world.step(spans, wrong=wrong)
    for request in range(2):
        assert torch.equal(whole.entries(request), world.entries(request))


def test_wide_tables_are_paged():
    """A table as wide as the request keeps every row where an ordinary paged cache would."""
    world = World(4, True, lengths=(24,))
    world.state = torch.full((9, 4, 4 * world.dim), math.nan)
    world.state_table = torch.tensor([[7, 0, 3, 5, 1, 8]], dtype=torch.int32)
    cut(world, (5, 1))
    world.check(0)
    biased = world.gate[0] + world.bias.repeat(6, 1)
    for position in range(24):
        row = world.state[world.state_table[0, position // 4], position % 4]
        assert torch.equal(row, torch.cat([world.kv[0][position], biased[position]]))
    assert world.state[[2, 4, 6]].isnan().all()


def test_nowhere_to_go():
    """Slots outside the cache store nothing and keep the state; blocks outside the state keep nothing."""
    world = World(4, True, lengths=(8,))
    for slot in (-1, INT_MIN, world.cache.shape[0], 2**40):
        world.call(world.kv[0][:4], world.gate[0][:4], [0, 1, 2, 3], [0] * 4, [-1, -1, -1, slot])
    assert world.cache.isnan().all() and not world.state[0, :4].isnan().any()
    kept, entries = world.state.clone(), []
    for block in (-1, 5, INT_MAX):  # the window before cannot be found: the entry pools its own four tokens
        world.state_table = torch.tensor([[block]], dtype=torch.int32)
        world.call(world.kv[0][4:], world.gate[0][4:], [4, 5, 6, 7], [0] * 4, [-1, -1, -1, 2])
        entries.append(world.cache[2].clone())
    assert not entries[0].isnan().any() and all(torch.equal(entry, entries[0]) for entry in entries)
    assert torch.equal(kept.nan_to_num(7.0), world.state.nan_to_num(7.0))
    world.call(world.kv[0][:0], world.gate[0][:0], [], [], [])


def test_hadamard_keeps_scores():
    world, turned = World(4, True, lengths=(16,)), World(4, True, lengths=(16,))
    turned.options["hadamard"] = True
    plain, rotated = (cut(w, (16,)).entries(0) for w in (world, turned))
    torch.testing.assert_close(plain @ plain.T, rotated @ rotated.T)
    assert not torch.allclose(plain, rotated)


def test_schema():
    assert_expected_inline(
        schema("compress_and_cache").replace(", ", ",\n"),
        """\
sparse_attn::compress_and_cache(Tensor kv,
Tensor gate,
Tensor position_bias,
Tensor norm_weight,
Tensor positions,
Tensor request_ids,
Tensor(a!) state,
Tensor state_table,
Tensor(b!) cache,
Tensor slot_mapping,
Tensor cos_sin,
int ratio,
bool overlap,
float eps,
int rope_start,
bool hadamard,
str layout,
str impl) -> ()""",
    )


def arguments(layout, tokens, device="cpu"):
    width = 2 * layout.dim
    cache = allocate_cache(layout, 3, 2, device)
    return [
        torch.randn(tokens, width, device=device), torch.randn(tokens, width, device=device),
        torch.randn(4, width, device=device), torch.ones(layout.dim, device=device),
        torch.arange(tokens, dtype=torch.int32, device=device), torch.zeros(tokens, dtype=torch.int32, device=device),
        torch.zeros(2, 8, 2 * width, device=device), torch.tensor([[1]], dtype=torch.int32, device=device), cache,
        torch.tensor([p // 4 if p % 4 == 3 else -1 for p in range(tokens)], dtype=torch.int64, device=device),
        rope_table(16, 8, 1e2, device=device),
    ]  # fmt: skip


def check_opcheck(impl, device):
    for layout in (PLAIN, PlanarFp8Layout(24, 8, group=8), IndexFp8Layout(32)):
        for tokens in (0, 9):
            opcheck("compress_and_cache", *arguments(layout, tokens, device), 4, True, 1e-5, 24, False, layout.name, impl)


def test_opcheck():
    check_opcheck("auto", "cpu")


NAMES = ("kv", "gate", "position_bias", "norm_weight", "positions", "request_ids", "state", "state_table", "cache",
         "slot_mapping", "cos_sin")  # fmt: skip


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(kv=lambda x: x.bfloat16()), TypeError, "kv: got dtype bfloat16"),
        (dict(kv=lambda x: x[:, :40].contiguous()), ValueError, r"kv: got width 40, allowed: 2 \* 32"),
        (dict(gate=lambda x: x[:3]), ValueError, "gate: got shape"),
        (dict(gate=lambda x: x.T.contiguous().T), ValueError, "gate: got stride"),
        (dict(position_bias=lambda x: x[:3]), ValueError, "position_bias: got shape"),
        (dict(norm_weight=lambda x: x[:3]), ValueError, "norm_weight: got shape"),
        (dict(positions=lambda x: x.long()), TypeError, "positions: got dtype int64"),
        (dict(request_ids=lambda x: x[:3]), ValueError, "request_ids: got shape"),
        (dict(slot_mapping=lambda x: x.int()), TypeError, "slot_mapping: got dtype int32"),
        (dict(state=lambda x: x.half()), TypeError, "state: got dtype float16"),
        (dict(state=lambda x: x[..., :8]), ValueError, "state: got shape"),
        (dict(state=lambda x: x[:, :4]), ValueError, r"state_table: got rings of 1 \* 4 rows, allowed: at least the 8"),
        (dict(state=lambda x: x[:, ::2]), ValueError, "state: got strides"),
        (dict(state_table=lambda x: x[0]), ValueError, "state_table: got 1 dimensions"),
        (dict(cache=lambda x: x[..., :8]), ValueError, "cache: got shape"),
        (dict(cos_sin=lambda x: x.to("meta")), ValueError, "cos_sin: got device meta"),
        (dict(rope_start=25), ValueError, "rope_start: got 25 for 8 rotated values"),
        (dict(rope_start=-2), ValueError, "rope_start: got -2"),
        (dict(ratio=0), ValueError, "ratio: got 0"),
        (dict(layout="plain"), ValueError, "layout: got 'plain'"),
        (dict(impl="cuda"), ValueError, "impl: got 'cuda'"),
    ],
)
def test_errors(change, error, message):
    given = dict(zip(NAMES, arguments(PLAIN, 9)))
    options = dict(ratio=4, overlap=True, eps=1e-5, rope_start=24, layout=PLAIN)
    for name, value in change.items():
        if name in given:
            given[name] = value(given[name])
        else:
            options[name] = value
    with pytest.raises(error, match=message):
        compress_and_cache(*given.values(), **options)


def check_kernels(ratio, overlap, layout, device, sizes, **options):
    """Both implementations step by step: state bit for bit; entries within a step of what they are stored in."""
    ours = cut(World(ratio, overlap, layout, device=device, impl="triton", **options), sizes)
    want = cut(World(ratio, overlap, layout, impl="reference", **options), sizes)
    assert torch.equal(ours.memory.cpu().nan_to_num(7.0), want.memory.nan_to_num(7.0))
    ours.check_canaries()
    for request in range(len(want.kv)):
        if len(want.kv[request]) < ratio:
            continue
        got, wanted = ours.entries(request), want.entries(request)
        step = {torch.float32: 2e-6, torch.bfloat16: 2**-7, torch.uint8: 2**-3}[ours.cache.dtype]
        torch.testing.assert_close(got, wanted, rtol=step, atol=1e-5 if step < 0.1 else 2e-3)
        assert (got != wanted).float().mean() < (1.0 if step < 1e-5 else 0.02)


@pytest.mark.kernel
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("ratio, overlap", FORMS)
def test_kernels_match_reference(device, ratio, overlap, layout):
    check_kernels(ratio, overlap, layout, device, (5, 1, 9), lengths=(21, 9, 3))


@pytest.mark.kernel
@pytest.mark.parametrize("ratio, overlap", FORMS)
def test_kernels_over_steps(device, ratio, overlap):
    """Bit for bit however the sequence is cut."""
    options = dict(device=device, impl="triton", lengths=(20, 9))
    whole = cut(World(ratio, overlap, **options), (64,))
    for sizes in ((1,), (3, 7)):
        parts = cut(World(ratio, overlap, **options), sizes)
        assert torch.equal(whole.entries(0), parts.entries(0)) and torch.equal(whole.entries(1), parts.entries(1))


@pytest.mark.kernel
def test_opcheck_kernel(device):
    check_opcheck("triton", device)


@pytest.mark.kernel
@pytest.mark.parametrize("layout", [PlanarFp8Layout(448, 64), PlainLayout("bf16", 512), IndexFp8Layout(128)])
@pytest.mark.parametrize("ratio, overlap", [(4, True), (128, False)])
def test_real_dims(device, ratio, overlap, layout):
    if big(device):
        check_kernels(ratio, overlap, layout, device, (300, 1, 1, 1, 130), lengths=(520, 131))
    elif ratio == 4:
        check_kernels(ratio, overlap, layout, device, (6,), lengths=(9,))


@pytest.mark.parametrize("layout, ratio, overlap", [
    (PlanarFp8Layout(448, 64), 4, True), (PlanarFp8Layout(448, 64), 128, False), (IndexFp8Layout(128), 4, True),
])  # fmt: skip
def test_kernels_on_hopper(layout, ratio, overlap):
    from sparse_attn.ops.compressor import config, kernels, launch
    from sparse_attn.target import H200
    from sparse_attn.testing.aot import compile_kernel

    span, width = (2 if overlap else 1) * ratio, (2 if overlap else 1) * layout.dim
    chosen = config.config(layout.dim, span, H200)
    floats = ("kv", "gate", "position_bias", "state", "norm_weight", "cos_sin")
    integers = ("positions", "request_ids", "state_table")
    pointers = dict.fromkeys(floats, "*fp32") | dict.fromkeys(integers, "*i32") | dict(cache="*u8", slot_mapping="*i64")
    constants = dict(
        DIM=layout.dim, PADDED=layout.dim, RATIO=ratio, SPAN=span, OVERLAP=overlap, ROPE_START=layout.dim - 64,
        ROPE_WIDTH=64, HADAMARD=False, STAGES=9, ROWS=chosen.rows, **launch._record(layout, layout.dim),
    )  # fmt: skip
    scalars = {n: "i32" for n in kernels.pool.arg_names if n not in pointers and n not in constants} | dict(eps="fp32")
    pool = compile_kernel(kernels.pool, pointers | scalars, constants, num_warps=chosen.num_warps)
    assert pool.spill_bytes == 0 and pool.registers <= 255
    constants = dict(WIDTH=width, RATIO=ratio, COLUMNS=chosen.keep_columns)
    names = kernels.keep.arg_names
    signature = {n: pointers.get(n, "i32") for n in names if n not in constants}
    assert compile_kernel(kernels.keep, signature, constants, num_warps=4).spill_bytes == 0
