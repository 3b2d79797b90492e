"""Whole layers and whole loops: a captured decode loop against the same loop compiled without graphs, and one attention
layer against transformers' own."""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator

import torch

from benchmarks.record import Record
from benchmarks.registry import suite
from benchmarks.run import Run
from sparse_attn import DecodeGraph, Model, Sampling
from sparse_attn.generation.steps import Decode, decode_plan, decode_step
from sparse_attn.mesh import ONE_RANK
from sparse_attn.models.deepseek_v32 import allocate_caches
from sparse_attn.models.mla import attention
from sparse_attn.models.params import FP32_NAMES, model_rope_tables
from sparse_attn.models.shapes import param_shapes
from sparse_attn.models.step import ModelStep
from sparse_attn.ops.ragged.step_plans import build_step_plan
from sparse_attn.pipeline import cache_layouts
from sparse_attn.pipeline.options import Options
from sparse_attn.spec import Spec, deepseek_v32, tiny_v32
from sparse_attn.types import Caches, StepPlan

BLOCK = 64


def model_of(spec: Spec, device: str) -> Model:
    """Random weights made where they are used."""
    params = {}
    for name, shape in param_shapes(spec).items():
        dtype = torch.float32 if name.endswith(FP32_NAMES) else torch.bfloat16
        value = torch.randn(shape, device=device, dtype=dtype) * 0.02
        params[name] = torch.nn.Parameter(value, requires_grad=False)
    params |= model_rope_tables(spec, device)
    return Model(spec, params, cache_layouts(spec, "fp8"))


def state_of(batch: int, length: int, width: int, device: str) -> Decode:
    return Decode(
        torch.arange(batch, device=device),
        torch.full((batch,), length, dtype=torch.int32, device=device),
        torch.arange(batch * width, dtype=torch.int32, device=device).view(batch, width),
        torch.arange(batch + 1, dtype=torch.int32, device=device),
        torch.zeros(0, dtype=torch.int64, device=device),
    )


def wall_us(work: Callable[[], object], steps: int, repeats: int = 5) -> float:
    """Median microseconds per step of ``work``, which makes ``steps`` of them, the host included."""
    work()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - begin)
    return statistics.median(times) * 1e6 / steps


def four_layers(run: Run) -> Spec:
    """V3.2 with its attention's dims, 4 layers and 16 small experts; dry: tiny."""
    full = deepseek_v32()
    small = dataclasses.replace(
        full.moe, num_experts=16, experts_per_token=4, num_groups=1, top_groups=1, intermediate_size=256
    )
    spec = dataclasses.replace(
        full, vocab_size=1024, num_layers=4, moe=small, dense_intermediate_size=1024,
        moe_layers=(False, True, True, True), index_layers=(True,) * 4,
    )  # fmt: skip
    return run.pick(spec, tiny_v32())


@suite("decode_loop")
def decode_loop(run: Run) -> Iterator[Record]:
    "4 layers of V3.2's attention dims and 16 small experts: captured against compiled without graphs, b 1 and 8."
    spec = four_layers(run)
    context, steps = run.pick(8192, 128), run.pick(50, 2)
    width = context // BLOCK
    model = model_of(spec, run.device)
    for batch in (1, 8):
        caches = allocate_caches(spec, model.layouts, batch * width, BLOCK, run.device)
        state = state_of(batch, context // 2, width, run.device)
        if run.dry:
            decode_step(model, caches, state, Sampling(), context)
            yield Record(f"requests {batch}", 0.0)
            continue
        torch.compiler.reset()
        compiled = torch.compile(model, fullgraph=True, dynamic=True)

        def without(compiled=compiled, caches=caches, state=state):
            for _ in range(steps):
                decode_step(compiled, caches, state, Sampling(), context)

        slow = wall_us(without, steps)
        graph = DecodeGraph(compiled, caches, max_context=context, max_blocks=width, buckets=(batch,))
        graph.load(state.tokens, state.seq_lens, state.block_table)
        fast = wall_us(lambda graph=graph: graph.run(steps), steps)
        launching = time.perf_counter()
        graph.run(1000)
        launching = (time.perf_counter() - launching) * 1e3
        torch.cuda.synchronize()
        yield Record(f"requests {batch} (host {launching:.1f} us a replay)", fast, "compiled, no graph", slow)


class Layer(torch.nn.Module):
    """A model's first attention layer."""

    def __init__(self, model: Model, caches: Caches):
        super().__init__()
        self.params, self.spec, self.layouts, self.caches = model.params, model.spec, model.layouts, caches

    def forward(self, hidden: torch.Tensor, plan: StepPlan) -> torch.Tensor:
        step, kv, index = ModelStep(plan, self.layouts, Options(), ONE_RANK), self.caches.kv[0], self.caches.index[0]
        return attention(hidden, self.params, "layers.0.", self.spec, kv, index, None, step)[0]


@suite("hf_layer")
def hf_layer(run: Run) -> Iterator[Record]:
    "One compiled attention layer of V3.2's full dims against transformers' DeepseekV32Attention, eager and sdpa."
    spec = dataclasses.replace(
        deepseek_v32(),
        vocab_size=256,
        num_layers=1,
        dense_intermediate_size=64,
        moe_layers=(False,),
        index_layers=(True,),
    )
    spec = run.pick(spec, dataclasses.replace(tiny_v32(), num_layers=1, moe_layers=(False,), index_layers=(True,)))
    context, rows = run.pick((8192, 4096), (128, 64))
    width = context // BLOCK
    model = model_of(spec, run.device)
    caches = allocate_caches(spec, model.layouts, width, BLOCK, run.device)
    hidden = torch.randn(rows, spec.hidden_size, device=run.device, dtype=torch.bfloat16)

    layer = Layer(model, caches)
    if not run.dry:
        torch.compiler.reset()
        layer = torch.compile(layer, fullgraph=True)
    step = decode_plan(state_of(1, context, width, run.device), BLOCK, context)
    table = torch.arange(width, dtype=torch.int32, device=run.device).view(1, width)
    prefill = build_step_plan(
        torch.tensor([0, rows], dtype=torch.int32, device=run.device),
        torch.tensor([rows], dtype=torch.int32, device=run.device),
        table,
        torch.arange(rows, device=run.device),
        kv_capacity=rows,
        max_context=context,
    )
    decode_us = run.time([lambda: layer(hidden[:1], step)])
    prefill_us = run.time([lambda: layer(hidden, prefill)])
    if run.dry:
        yield Record("decode", decode_us)
        yield Record("prefill", prefill_us)
        return
    for kind in ("eager", "sdpa"):
        theirs_prefill, theirs_decode = _transformers(kind, hidden, context)
        yield Record(f"prefill {rows}, {kind}", prefill_us, f"transformers {kind}", theirs_prefill)
        yield Record(f"decode, context {context}, {kind}", decode_us, f"transformers {kind}", theirs_decode)


@torch.no_grad()
def _transformers(kind: str, hidden: torch.Tensor, context: int) -> tuple[float, float]:
    """Microseconds of transformers' layer for the whole ``hidden``, and for one token at ``context``, as a user runs
    it. transformers from 5.24, whose cache holds latents."""
    from transformers import DynamicCache
    from transformers.models.deepseek_v32.configuration_deepseek_v32 import DeepseekV32Config
    from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention, DeepseekV32RotaryEmbedding

    config = DeepseekV32Config(num_hidden_layers=1, rope_parameters={"rope_type": "default", "rope_theta": 10000.0})
    config._attn_implementation = kind
    with hidden.device:
        layer = DeepseekV32Attention(config, 0).to(torch.bfloat16).eval()
        rotary = DeepseekV32RotaryEmbedding(config=config)
        for weight in layer.parameters():
            if weight.dim() == 2:
                weight.normal_(std=0.02)
        rows = hidden.shape[0]
        mask = torch.full((rows, rows), float("-inf"), dtype=torch.bfloat16, device=hidden.device).triu(1)[None, None]
        x = hidden.unsqueeze(0)
        angles = rotary(x, torch.arange(rows, device=hidden.device)[None])
        prefill = wall_us(lambda: layer(x, angles, mask, cache=None), 1)

        cache, past = DynamicCache(config=config), context - 1
        drawn = dict(dtype=torch.bfloat16, device=hidden.device)
        latents = (torch.randn(1, 1, past, dim, **drawn) for dim in (config.kv_lora_rank, config.qk_rope_head_dim))
        cache.update(*latents, 0)
        cache.update_indexer(torch.randn(1, past, config.index_head_dim, **drawn), 0)
        one = x[:, :1].contiguous()
        angles = rotary(one, torch.full((1, 1), past, dtype=torch.int64, device=hidden.device))
        open_mask = torch.zeros(1, 1, 1, context, **drawn)

        def decode():
            layer(one, angles, open_mask, cache=cache)
            cache.crop(-1)

        return prefill, wall_us(decode, 1, repeats=20)
