"""Requests whose block tables share the blocks of a prefix: they decode what they decode alone, and write none of
them."""

from __future__ import annotations

import pytest
import torch

from sparse_attn import Model, Sampling, build_step_plan, generate
from sparse_attn.generation.blocks import slots_of
from sparse_attn.generation.steps import Decode, decode_step
from sparse_attn.models.params import random_params
from sparse_attn.pipeline import cache_layouts
from sparse_attn.spec import preset

BLOCK, STEPS = 16, 40  # decoding crosses borders of blocks
PREFIX = [(7 * n * n + 3) % 256 for n in range(6 * BLOCK)]  # longer than the models' top-k of 64
TAILS = [[1, 2, 3], [9] * BLOCK, [200]]  # the second fills a block


def prefill(model, caches, table, rows, spans):
    """Run ``spans`` (ids, first position computed) of requests ``rows`` as one step; logits of the last rows."""
    counts = torch.tensor([len(ids) - start for ids, start in spans])
    lens = torch.tensor([len(ids) for ids, _ in spans], dtype=torch.int32)
    positions = torch.cat([torch.arange(start, len(ids)) for ids, start in spans])
    plan = build_step_plan(
        torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int(), lens, table[rows],
        slots_of(table, torch.tensor(rows).repeat_interleave(counts), positions, BLOCK),
        kv_capacity=int(lens.sum()), max_context=table.shape[1] * BLOCK,
    )  # fmt: skip
    tokens = torch.tensor([token for ids, start in spans for token in ids[start:]])
    return model(tokens, caches, plan)[counts.cumsum(0) - 1]


@pytest.mark.parametrize("name", ("tiny_v32", "tiny_glm5"))
def test_requests_that_share_a_prefix_decode_what_they_decode_alone(name):
    spec = preset(name)
    model = Model(spec, random_params(spec, seed=2), cache_layouts(spec, "fp32"))
    shared, own = len(PREFIX) // BLOCK, 4
    caches = model.allocate_caches(shared + 3 * own, BLOCK, requests=3, step_rows=1)
    common = torch.arange(shared, dtype=torch.int32).expand(3, shared)
    table = torch.cat([common, shared + torch.arange(3 * own, dtype=torch.int32).view(3, own)], 1)
    prompts = [PREFIX + tail for tail in TAILS]

    first = prefill(model, caches, table, [0], [(prompts[0], 0)])
    before = [cache[:shared].clone() for layers in caches for cache in layers if cache is not None]
    others = prefill(model, caches, table, [1, 2], [(ids, len(PREFIX)) for ids in prompts[1:]])
    tokens = torch.cat([first, others]).argmax(1)
    lens = torch.tensor([len(ids) + 1 for ids in prompts], dtype=torch.int32)
    state = Decode(tokens, lens, table, torch.arange(4, dtype=torch.int32), torch.empty(0, dtype=torch.int64))
    drawn = [tokens.clone()]
    for _ in range(STEPS - 1):
        decode_step(model, caches, state, Sampling(), table.shape[1] * BLOCK)
        drawn.append(state.tokens.clone())

    after = [cache[:shared] for layers in caches for cache in layers if cache is not None]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    for row, ids in zip(torch.stack(drawn, 1).tolist(), prompts):
        assert row == generate(model, [ids], max_new_tokens=STEPS).tokens[0]
