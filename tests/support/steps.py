"""Steps of small models with paged caches, eager and compiled."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from unittest import mock

import torch

from sparse_attn import Model
from sparse_attn.framework.torch_private import counters
from sparse_attn.generation.blocks import slots_of
from sparse_attn.generation.steps import Decode, decode_plan
from sparse_attn.models import windowed as windowed_model
from sparse_attn.models.params import random_params
from sparse_attn.ops.ragged.step_plans import build_step_plan
from sparse_attn.pipeline import cache_layouts, latent, windowed
from sparse_attn.pipeline.layouts import window_ring
from sparse_attn.spec import CompressedSpec, preset

BLOCK, WIDTH = 16, 20  # tokens of a block, blocks of a request
MAX_CONTEXT = BLOCK * WIDTH
STEP_ROWS = 96  # most rows of a request in a step


def small(name: str, layers: int):
    """A preset cut to its first layers: the dense one, an index layer and, for GLM-5, one that shares a selection; for
    DeepSeek-V4 one of each kind, with windows and top-k far below the context."""
    spec = preset(name)
    if isinstance(spec, CompressedSpec):
        return replace(
            spec, num_layers=layers, layer_kinds=("window", "indexed", "full")[:layers], window=8, full_ratio=BLOCK,
            hash_layers=spec.hash_layers[:layers], index=replace(spec.index, top_k=8),
        )  # fmt: skip
    return replace(
        spec, num_layers=layers, moe_layers=spec.moe_layers[:layers], index_layers=spec.index_layers[:layers]
    )


def layer_of(kind: str) -> CompressedSpec:
    """V4, one layer of a kind."""
    return replace(small("tiny_v4", 1), layer_kinds=(kind,), hash_layers=(False,))


def model_of(name: str, cache: str, device="cpu", layers: int = 2) -> Model:
    spec = small(name, layers)
    return Model(spec, random_params(spec, seed=0, device=device), cache_layouts(spec, cache))


def decode_state(batch: int, length: int, device="cpu", seed: int = 0, rings: bool = False) -> Decode:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(1, length + 1, (batch,), generator=generator, dtype=torch.int32)
    if batch > 2:
        lengths[1] = 0  # a padded row
    blocks = torch.randperm(batch * WIDTH, generator=generator).int().reshape(batch, WIDTH)
    return Decode(
        torch.randint(0, 256, (batch,), generator=generator).to(device),
        lengths.to(device),
        blocks.to(device),
        torch.arange(batch + 1, dtype=torch.int32, device=device),
        torch.zeros(0, dtype=torch.int64, device=device),
        torch.randperm(batch, generator=generator).int().unsqueeze(1).to(device) if rings else None,
    )


def plan_of(model: Model, state: Decode):
    """The plan of a decode step."""
    block_size = window_ring(model.spec, STEP_ROWS) if model.has_rings else BLOCK
    return decode_plan(state, block_size, MAX_CONTEXT)


def prefill_plan(model: Model, counts: list[int], starts: list[int], capacity: int):
    """A prefill step of len(counts) requests that feed counts[i] tokens from position starts[i] on."""
    device = model.device
    queries, past = torch.tensor(counts), torch.tensor(starts)
    requests = torch.arange(len(counts)).repeat_interleave(queries)
    positions = torch.cat([torch.arange(a, a + n) for a, n in zip(starts, counts)])
    table = torch.arange(len(counts) * WIDTH, dtype=torch.int32).reshape(len(counts), WIDTH)
    rings = torch.arange(len(counts), dtype=torch.int32).unsqueeze(1) if model.has_rings else None
    written = (table, BLOCK) if rings is None else (rings, window_ring(model.spec, STEP_ROWS))
    plan = build_step_plan(
        torch.nn.functional.pad(queries.cumsum(0), (1, 0)).to(device, torch.int32),
        (past + queries).to(device, torch.int32),
        table.to(device),
        slots_of(written[0], requests, positions, written[1]).to(device),
        kv_capacity=capacity,
        max_context=MAX_CONTEXT,
    )
    return plan._replace(ring_table=None if rings is None else rings.to(device))


def filled_caches(model: Model, batch: int):
    """Caches that hold something finite in every slot."""
    caches = model.allocate_caches(batch * WIDTH, BLOCK, requests=batch, step_rows=STEP_ROWS)
    generator = torch.Generator().manual_seed(5)
    for kind, layers in caches._asdict().items():
        layout = model.layouts.index if kind == "index" else model.layouts.kv
        for cache in layers:
            if cache is None:
                continue
            host = cache.cpu()
            if "state" in kind:
                host.copy_(torch.randn(host.shape, generator=generator))
            else:
                slots = torch.arange(host.shape[0] * host.shape[1])
                layout.encode(host, slots, torch.randn(slots.numel(), layout.dim, generator=generator))
            cache.copy_(host)
    return caches


def tensors_of(caches):
    return [cache for layers in caches for cache in layers if cache is not None]


def no_more_compilations():
    return torch.compiler.set_stance("fail_on_recompile")


def fresh():
    torch.compiler.reset()
    counters().clear()


def moved_codes(model, caches, others):
    """fp8 values of two sets of caches that differ by more than fp32 rounding: those of the first layer that has any,
    and the share of all."""
    moved, values = {}, 0
    for kind, layers in caches._asdict().items():
        layout = model.layouts.index if kind == "index" else model.layouts.kv
        for number, (mine, theirs) in enumerate(zip(layers, getattr(others, kind))):
            if mine is not None and mine.dtype == torch.uint8:
                slots = torch.arange(mine.shape[0] * mine.shape[1], device=mine.device)
                a, b = layout.decode(mine, slots), layout.decode(theirs, slots)
                moved[number] = moved.get(number, 0) + int(((a - b).abs() > 1e-5 * b.abs()).sum())
                values += a.numel()
    return moved[min(moved)] if moved else 0, sum(moved.values()) / max(1, values)


@contextlib.contextmanager
def nothing_written():
    """Steps read caches that already hold what they would write."""
    writers = (latent, "write_kv_cache"), (latent, "indexer_k_quant_and_cache"), (windowed, "write_kv_cache"), (
        windowed_model, "compress_and_cache")  # fmt: skip
    with contextlib.ExitStack() as stack:
        for module, name in writers:
            stack.enter_context(mock.patch.object(module, name, lambda *_, **__: None))
        yield


def check_step(model, compiled, tokens, plan, batch, exact):
    """Fused kernels round otherwise than eager ones, so that a key on the border between two fp8 codes may fall either
    way; one that did moves some in the layers behind it. Eager then attends to the codes of the compiled step: the
    logits agree to fp32 either way."""
    eager_caches, caches = filled_caches(model, batch), filled_caches(model, batch)
    want, got = model(tokens, eager_caches, plan), compiled(tokens, caches, plan)
    if exact:
        for mine, theirs in zip(tensors_of(caches), tensors_of(eager_caches)):
            assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8))
    else:
        first, share = moved_codes(model, caches, eager_caches)
        assert first <= 50 and share < 0.1
        with nothing_written():
            want = model(tokens, caches, plan)
    tolerance = 0 if exact else 1e-4
    torch.testing.assert_close(got, want, rtol=tolerance, atol=tolerance)


def check_decode(model, compiled, exact, alone=True):
    """alone: batches of one, too, which are a compilation of their own."""
    device = model.device
    for batch, length in ((2, 1), (1, 5))[: 1 + alone]:
        state = decode_state(batch, length, device, rings=model.has_rings)
        check_step(model, compiled, state.tokens, plan_of(model, state), batch, exact)
    assert counters()["stats"]["unique_graphs"] == 1 + alone
    with no_more_compilations():
        batches = (3, 70), (64, MAX_CONTEXT), (2, 200), (7, 1), (1, MAX_CONTEXT)
        for seed, (batch, length) in enumerate(batches[: 4 + alone]):
            state = decode_state(batch, length, device, seed, model.has_rings)
            check_step(model, compiled, state.tokens, plan_of(model, state), batch, exact)
