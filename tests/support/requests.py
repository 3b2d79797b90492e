"""Drives the functional forward over paged caches, the way an engine would: requests with blocks in shuffled order."""

import torch
from support.caches import poison

from sparse_attn import Model
from sparse_attn.ops.ragged.step_plans import build_step_plan
from sparse_attn.pipeline import default_block_size
from sparse_attn.spec import CompressedSpec


class Requests:
    """Requests of one model. ``step`` runs any mix of decodes (one token each) and prefill chunks."""

    def __init__(
        self, spec, params, layouts, count, max_len, block_size=None, impl="auto", logits_bytes=1 << 20, step_rows=None,
        next_n=1,
    ):  # fmt: skip
        self.model = Model(spec, params, layouts, impl, logits_bytes)
        self.spec, self.impl, self.max_len, self.device = spec, impl, max_len, self.model.device
        self.windowed = isinstance(spec, CompressedSpec)
        self.block_size = block_size or (default_block_size(spec) if self.windowed else 8)
        per_request = -(-max_len // self.block_size)
        blocks = torch.randperm(count * per_request + 3, generator=torch.Generator().manual_seed(5))
        self.block_table = blocks[: count * per_request].int().view(count, per_request)
        self.rings = torch.randperm(count + 1, generator=torch.Generator().manual_seed(6))[:count].int().unsqueeze(1)
        self.caches = self.model.allocate_caches(
            len(blocks), self.block_size, requests=count + 1, step_rows=step_rows or max_len, next_n=next_n
        )
        for cache in (cache for layers in self.caches for cache in layers):
            if cache is not None:  # NaN, in every layout
                cache.fill_(poison(cache.dtype))
        self.lengths = [0] * count

    def step(self, decode=(), prefill=(), padding=0):
        """decode, prefill: (request, token ids) pairs. Returns fp32 logits per pair, decode first."""
        pairs = [*decode, *prefill]
        ids, slots, starts = [], [], [0]
        table, size = self.block_table, self.block_size
        if self.windowed:
            table, size = self.rings, self.caches.kv[0].shape[1]
        for request, tokens in pairs:
            positions = torch.arange(len(tokens)) + self.lengths[request]
            block = table[request].long()[positions // size % table.shape[1]]
            ids.append(torch.as_tensor(tokens))
            slots.append(block * size + positions % size)
            self.lengths[request] += len(tokens)
            if self.lengths[request] <= 0:  # a padded request
                slots[-1].fill_(-1)
            starts.append(starts[-1] + len(tokens))
        ids.append(torch.zeros(padding, dtype=torch.int64))
        slots.append(torch.full((padding,), -1))
        rows = [request for request, _ in pairs]
        seq_lens = torch.tensor([self.lengths[request] for request in rows], dtype=torch.int32)
        plan = build_step_plan(
            torch.tensor(starts, dtype=torch.int32, device=self.device),
            seq_lens.to(self.device),
            self.block_table[rows].to(self.device),
            torch.cat(slots).to(self.device),
            num_decodes=len(decode),
            next_n=len(decode[0][1]) if decode else 1,
            kv_capacity=sum(self.lengths[request] for request, _ in prefill) + (3 if prefill else 0),
            max_context=self.max_len,
            impl=self.impl,
        )
        if self.windowed:
            plan = plan._replace(ring_table=self.rings[rows].to(self.device))
        logits = self.model(torch.cat(ids).to(self.device), self.caches, plan)
        return [logits[low:high] for low, high in zip(starts, starts[1:])]
