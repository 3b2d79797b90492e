"""Sequences for tests of the compressor: what they are, how they are fed, and their entries in plain Python."""

import math

import torch
from support.caches import poison
from support.extremes import INT_MAX, INT_MIN

from sparse_attn.layout import IndexFp8Layout, IndexMxfp4Layout, PlainLayout, PlanarFp8Layout
from sparse_attn.ops.attention.compressor import compress_and_cache
from sparse_attn.ops.layers.rope import rope_table

PLAIN = PlainLayout("fp32", 32)
LAYOUTS = [
    PLAIN, PlainLayout("bf16", 20), PlanarFp8Layout(24, 8, group=8), PlanarFp8Layout(48, 16, 16, "e4m3fnuz"),
    IndexFp8Layout(32), IndexFp8Layout(32, "e4m3fnuz", "raw"),
    IndexMxfp4Layout(32),
]  # fmt: skip
FORMS = [(4, True), (8, False)]  # ratio, overlap
ROTATED, EPS = 8, 1e-5


def strided(values, device):
    """The same [n], every third element of a tensor that names nothing in between."""
    wide = torch.full((len(values), 3), INT_MIN, dtype=values.dtype, device=device)
    wide[:, 1] = values
    return wide[:, 1]


def widened(values, device):
    """The same [rows, columns] amid NaN."""
    rows, columns = values.shape
    wide = torch.full((rows, columns + 5), math.nan, dtype=values.dtype, device=device)
    wide[:, 2 : 2 + columns] = values
    return wide[:, 2 : 2 + columns]


class World:
    """Requests with sequences of known values, fed by steps.

    ring: (rows a block, blocks) of a request's ring, by default one block of what an entry pools and ``slack``. Rings,
    and caches of blocks of ``cache_block`` entries, start as NaN (0xFF), their blocks apart and between canaries.
    exact: values whose pooling is exact in any order: one token per channel takes it all.
    """

    def __init__(
        self, ratio, overlap, layout=PLAIN, *, lengths=(37, 21, 5), slack=0, ring=None, cache_block=1, exact=False,
        device="cpu", impl="auto", hadamard=False, seed=0,
    ):  # fmt: skip
        self.ratio, self.overlap, self.layout, self.device, self.impl = ratio, overlap, layout, device, impl
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape):
            return torch.randn(shape, generator=generator)

        self.dim, self.parts = layout.dim, 2 if overlap else 1
        width = self.parts * self.dim
        self.kv = [draw(length, width) for length in lengths]
        self.gate = [2 * draw(length, width) for length in lengths]
        self.bias = draw(ratio, width)
        if exact:
            self.kv = [(1 - 2 * (99 * kv).round() % 4) * kv.round().clamp(-2, 2).exp2() for kv in self.kv]
            ranks = [gate.argsort(0).argsort(0) * self.parts + torch.arange(width) // self.dim for gate in self.gate]
            self.gate, self.bias = [1000.0 * rank for rank in ranks], self.bias.round()
        self.norm = 1 + 0.2 * draw(self.dim)
        self.table = rope_table(max(lengths), ROTATED, 100.0, device="cpu")
        self.options = dict(
            ratio=ratio, overlap=overlap, eps=EPS, rope_start=self.dim - ROTATED, layout=layout, hadamard=hadamard
        )

        self.per_request, self.cache_block = -(-max(lengths) // ratio), cache_block
        entries = len(lengths) * self.per_request
        count = -(-entries // cache_block)
        self.cache_memory, self.cache = self.blocks(count + 2, cache_block, layout.row, layout.dtype)
        self.slots = cache_block + torch.randperm(entries, generator=generator)
        rows, columns = ring or (self.parts * ratio + slack, 1)
        count = len(lengths) * columns
        self.state_memory, state = self.blocks(count + 2, rows, 2 * width, torch.float32)
        self.state = state[1:-1]
        self.state_table = torch.randperm(count, generator=generator).int().reshape(len(lengths), columns)

    def blocks(self, count, size, row, dtype):
        """(memory, blocks [count, size, row] of it with a gap behind each)."""
        memory = torch.full((count, size * row + 16), poison(dtype), dtype=dtype, device=self.device)
        return memory, memory[:, : size * row].unflatten(1, (size, row))

    def slot(self, request, position):
        """Where the entry that ``position`` completes goes, -1 where it completes none."""
        if (position + 1) % self.ratio:
            return -1
        return int(self.slots[request * self.per_request + position // self.ratio])

    def step(self, spans, *, padding=(), wrong=()):
        """spans: (request, start, stop) of each request. padding: numbers of spans that padding rows stand in front of.
        wrong: (request, position) whose values are not the sequence's."""
        kv, gate, positions, requests, slots = [], [], [], [], []
        for number, (request, start, stop) in enumerate(spans):
            if number in padding:
                kv.append(torch.full((4, self.kv[0].shape[1]), math.nan))
                gate.append(kv[-1])
                complete = 2 * self.ratio - 1
                positions += [-1, complete, complete, INT_MIN]
                requests += [-1, INT_MAX, len(self.kv), request]
                slots += [0, 0, INT_MIN, 0]
            rows = torch.arange(start, stop)
            spoilt = torch.tensor([(request, p) in wrong for p in rows.tolist()]).unsqueeze(1)
            kv.append(self.kv[request][start:stop] + 9.0 * spoilt)
            gate.append(self.gate[request][start:stop] + 9.0 * spoilt)
            positions += rows.tolist()
            requests += [request] * len(rows)
            slots += [self.slot(request, p) for p in rows.tolist()]
        self.call(torch.cat(kv), torch.cat(gate), positions, requests, slots)

    def call(self, kv, gate, positions, requests, slots):
        compress_and_cache(
            widened(kv, self.device), widened(gate, self.device), widened(self.bias, self.device),
            self.norm.to(self.device), strided(torch.tensor(positions, dtype=torch.int32), self.device),
            strided(torch.tensor(requests, dtype=torch.int32), self.device), self.state,
            self.state_table.to(self.device), self.cache, strided(torch.tensor(slots, dtype=torch.int64), self.device),
            widened(self.table, self.device), **self.options, impl=self.impl,
        )  # fmt: skip

    def cut(self, sizes):
        """Feed all sequences by steps of ``sizes`` tokens, which requests take in turn; returns self."""
        at = [0] * len(self.kv)
        number = 0
        while any(a < len(kv) for a, kv in zip(at, self.kv)):
            spans = []
            for request, kv in enumerate(self.kv):
                stop = min(at[request] + sizes[(number + request) % len(sizes)], len(kv))
                if stop > at[request]:
                    spans.append((request, at[request], stop))
                    at[request] = stop
            self.step(spans, padding=(number % 3,))
            number += 1
        return self

    def speculate(self, next_n):
        """Feed all sequences by steps of up to ``next_n`` tokens, the last ones often wrong and then fed again; returns
        self."""
        generator = torch.Generator().manual_seed(next_n)
        at = [0] * len(self.kv)
        while any(a < len(kv) for a, kv in zip(at, self.kv)):
            spans = [(r, at[r], min(at[r] + next_n, len(kv))) for r, kv in enumerate(self.kv) if at[r] < len(kv)]
            wrong = set()
            for request, start, stop in spans:
                at[request] = start + int(torch.randint(1, stop - start + 1, (), generator=generator))
                wrong |= {(request, p) for p in range(at[request], stop)}
            self.step(spans, padding=(0,), wrong=wrong)
        return self

    def complete(self, request):
        """How many entries a request has in the end."""
        return len(self.kv[request]) // self.ratio

    def entries(self, request):
        """fp32 of what is cached of a request's complete entries."""
        first = request * self.per_request
        return self.layout.decode(self.cache, self.slots[first : first + self.complete(request)].to(self.device)).cpu()

    def wanted(self, request):
        """The same in plain Python per channel."""
        return torch.stack([self._wanted(request, e) for e in range(self.complete(request))]).float()

    def _wanted(self, request, e):
        kv, gate, values = self.kv[request], self.gate[request], []
        for d in range(self.dim):
            pooled = []
            for p in range(max(e - self.overlap, 0) * self.ratio, (e + 1) * self.ratio):
                at = d + self.dim * (self.overlap and p >= e * self.ratio)
                pooled.append((float(gate[p, at] + self.bias[p % self.ratio, at]), float(kv[p, at])))
            top = max(weight for weight, _ in pooled)
            shares = [math.exp(weight - top) for weight, _ in pooled]
            values.append(sum(share * value for share, (_, value) in zip(shares, pooled)) / sum(shares))
        row = torch.tensor(values, dtype=torch.float64)
        row = row / (row.pow(2).mean() + EPS).sqrt() * self.norm.double()
        cos, sin = self.table[e * self.ratio].double().chunk(2)
        a, b = row[-ROTATED:].unflatten(0, (-1, 2)).unbind(1)
        row[-ROTATED:] = torch.stack([a * cos - b * sin, b * cos + a * sin], 1).flatten()
        return row

    def check(self, request):
        if isinstance(self.layout, PlainLayout):
            tolerance = dict(rtol=1e-5, atol=1e-5) if self.layout.dtype_name == "fp32" else dict(rtol=2**-7, atol=1e-4)
        elif isinstance(self.layout, IndexMxfp4Layout):  # half a step
            tolerance = dict(rtol=0.2, atol=0.25)
        else:  # half an fp8 step of values up to 4
            tolerance = dict(rtol=2**-4, atol=0.02)
        torch.testing.assert_close(self.entries(request), self.wanted(request), **tolerance)

    def check_state(self):
        """The rings hold the last tokens, and NaN where none came."""
        rows, columns = self.state.shape[1], self.state_table.shape[1]
        for request, (kv, gate) in enumerate(zip(self.kv, self.gate)):
            want = torch.full((rows * columns, self.state.shape[2]), math.nan)
            positions = torch.arange(len(kv))
            kept = torch.cat([kv, gate + self.bias[positions % self.ratio]], dim=1)
            for position in range(len(kv)):
                want[position % len(want)] = kept[position]
            got = self.state[self.state_table[request].long().to(self.device)].flatten(0, 1).cpu()
            torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)

    def check_canaries(self):
        """The blocks at either end of caches and rings and the gaps between blocks are as they were."""

        def untouched(memory):
            return bool((memory == 0xFF).all() if memory.dtype == torch.uint8 else memory.isnan().all())

        for memory, blocks in ((self.cache_memory, self.cache), (self.state_memory, self.state)):
            gap = blocks.shape[1] * blocks.shape[2]
            assert untouched(memory[:, gap:]) and untouched(memory[0]) and untouched(memory[-1])

    def bits(self):
        """All bytes of caches and rings."""
        return [memory.cpu().contiguous().view(torch.uint8) for memory in (self.cache_memory, self.state_memory)]
