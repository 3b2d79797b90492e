"""Drives the functional forward over paged caches, the way an engine would: requests with blocks in shuffled order."""

import torch

from sparse_attn.models import deepseek_v32
from sparse_attn.ops.step_plan import build_step_plan


class Requests:
    """Requests of one model. ``step`` runs any mix of decodes (one token each) and prefill chunks."""

    def __init__(self, spec, params, layouts, count, max_len, block_size=8, impl="auto", logits_bytes=1 << 20):
        self.spec, self.params, self.layouts, self.block_size = spec, params, layouts, block_size
        self.impl, self.logits_bytes, self.max_len = impl, logits_bytes, max_len
        self.device = params["embed"].device
        per_request = -(-max_len // block_size)
        blocks = torch.randperm(count * per_request + 3, generator=torch.Generator().manual_seed(5))
        self.block_table = blocks[: count * per_request].int().view(count, per_request)
        self.caches = deepseek_v32.allocate_caches(spec, layouts, len(blocks), block_size, self.device)
        for cache in (*self.caches.kv, *self.caches.index):
            if cache is not None:  # NaN, in every layout
                cache.fill_(0xFF if cache.dtype == torch.uint8 else float("nan"))
        self.lengths = [0] * count

    def step(self, decode=(), prefill=(), padding=0):
        """decode, prefill: (request, token ids) pairs. Returns fp32 logits per pair, decode first."""
        pairs = [*decode, *prefill]
        ids, slots, starts = [], [], [0]
        for request, tokens in pairs:
            positions = torch.arange(len(tokens)) + self.lengths[request]
            block = self.block_table[request].long()[positions // self.block_size]
            ids.append(torch.as_tensor(tokens))
            slots.append(block * self.block_size + positions % self.block_size)
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
        logits = deepseek_v32.forward(
            self.params, self.spec, torch.cat(ids).to(self.device), self.caches, plan,
            layouts=self.layouts, impl=self.impl, logits_bytes=self.logits_bytes,
        )  # fmt: skip
        return [logits[low:high] for low, high in zip(starts, starts[1:])]
