"""One attention layer of transformers with ``attn_implementation="sparse_attn"``, against its own implementations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from benchmarks.loops import wall_us
from benchmarks.record import Record
from benchmarks.registry import suite
from benchmarks.run import Run

OURS = "sparse_attn"
ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
TINY = dict(
    hidden_size=64, num_attention_heads=4, q_lora_rank=24, index_n_heads=2, index_head_dim=16, index_topk=16,
    max_position_embeddings=256,
)  # fmt: skip
TINY_V32 = TINY | dict(num_key_value_heads=4, kv_lora_rank=32, qk_rope_head_dim=8, qk_nope_head_dim=16, v_head_dim=16)
TINY_V4 = TINY | dict(head_dim=32, sliding_window=8, o_groups=2, o_lora_rank=16, partial_rotary_factor=0.25)
V4_LAYER = dict(num_hidden_layers=1, layer_types=["compressed_sparse_attention"], mlp_layer_types=["moe"])
WIDE = ("norm", "sinks", "position_bias")  # of V4 transformers loads these in fp32, whatever the others' dtype


def made(run: Run, layer_type: Callable[..., torch.nn.Module], config: object) -> torch.nn.Module:
    """Layer 0 of ``config`` with random bf16 weights, made where it runs; norms stay as they are."""
    with torch.device(run.device):
        layer = layer_type(config, 0).bfloat16().eval().requires_grad_(False)
    for weight in layer.parameters():
        weight.normal_(std=0.02) if weight.dim() == 2 else weight.fill_(1.0)
    return layer


def mask_of(kind: str, rows: int, keys: int, past: int, device: str) -> torch.Tensor:
    """What transformers' mask function of ``kind`` makes for rows behind ``past`` tokens."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, causal_mask_function

    return ALL_MASK_ATTENTION_FUNCTIONS[kind](
        batch_size=1, q_length=rows, kv_length=keys, q_offset=past, kv_offset=0, mask_function=causal_mask_function,
        attention_mask=None, allow_is_causal_skip=False, dtype=torch.bfloat16, device=torch.device(device),
    )  # fmt: skip


def compiled(run: Run, layer: torch.nn.Module, rows: int) -> Callable[..., object]:
    """``layer`` as a decode step on a static cache is run, one graph; prefill is not compiled. Products of one row take
    generated code, which mode="max-autotune" does, too; independent small kernels share a launch."""
    options: Any = {"coordinate_descent_tuning": True, "combo_kernels": True}
    return layer if run.dry or rows > 1 else torch.compile(layer, fullgraph=True, dynamic=False, options=options)


def latent_call(run: Run, kind: str, context: int, rows: int) -> Callable[[], object]:
    """V3.2: the last ``rows`` of ``context`` on a static cache that holds those before."""
    from transformers import StaticCache
    from transformers.models.deepseek_v32 import modeling_deepseek_v32 as modeling

    sizes = run.pick({}, TINY_V32)
    config = modeling.DeepseekV32Config(num_hidden_layers=1, **ROPE, **sizes, attn_implementation=kind)
    layer, past = made(run, modeling.DeepseekV32Attention, config), context - rows
    run_layer = compiled(run, layer, rows) if kind == OURS else layer
    cache = StaticCache(config=config, max_cache_len=context)
    hidden = torch.randn(1, rows, config.hidden_size, dtype=torch.bfloat16, device=run.device)
    at = torch.arange(past, context, device=run.device)[None]
    angles = modeling.DeepseekV32RotaryEmbedding(config).to(run.device)(hidden, at)
    mask = mask_of(kind, rows, context, past, run.device)

    def call() -> object:
        held: Any = cache.layers[0]
        if held.is_initialized:
            held.cumulative_length.fill_(past)
            held.indexer_cumulative_length.fill_(past)
        return run_layer(hidden, angles, mask, cache=cache, position_ids=at)

    layer(hidden, angles, mask, cache=cache, position_ids=at)
    for values in (cache.layers[0].keys, cache.layers[0].values, cache.layers[0].indexer_keys):
        values.normal_()
    return call


class V4(NamedTuple):
    """A layer of ratio 4, its rotations, and how many rows stand before its step."""

    config: Any
    layer: torch.nn.Module
    rotary: torch.nn.Module

    def inputs(self, run: Run, count: int, before: int) -> tuple[torch.Tensor, dict[str, Any], torch.Tensor]:
        """(hidden states, their rotations, their positions) of ``count`` rows behind ``before``."""
        hidden = torch.randn(1, count, self.config.hidden_size, dtype=torch.bfloat16, device=run.device)
        at = torch.arange(before, before + count, device=run.device)[None]
        return hidden, {name: self.rotary(hidden, at, layer_type=name) for name in ("main", "compress")}, at


def v4(run: Run, kind: str) -> V4:
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

    config = modeling.DeepseekV4Config(**V4_LAYER, **run.pick({}, TINY_V4), attn_implementation=kind)
    rotary = modeling.DeepseekV4RotaryEmbedding(config).to(run.device)
    layer = made(run, modeling.DeepseekV4Attention, config)
    for name, weight in layer.named_parameters():
        if any(part in name for part in WIDE):
            weight.data = weight.float()
    return V4(config, layer, rotary)


def growing_call(run: Run, kind: str, context: int, rows: int) -> Callable[[], object]:
    """V4: as ``latent_call``, on transformers' own cache, whose state is put back each time."""
    from transformers import DynamicCache

    model, past = v4(run, kind), context - rows
    cache, window = DynamicCache(config=model.config), model.config.sliding_window

    def step(count: int, before: int) -> Callable[[], object]:
        inputs, width = model.inputs(run, count, before), min(before, window - 1)
        mask = mask_of(kind, count, width + count, width, run.device)
        if kind == OURS:
            mask[..., 0] = (mask[..., 1] - window).clamp(min=0)
        else:
            mask = mask + mask.new_full(mask.shape, torch.finfo(mask.dtype).min).tril(width - window)
        return lambda: model.layer(*inputs, mask, cache=cache)

    chunk = min(past, 1024)
    for before in range(0, past // chunk * chunk, chunk):
        step(chunk, before)()
    held = vars(cache.layers[0])
    saved = {name: dict(value) if isinstance(value, dict) else value for name, value in held.items()}
    last = step(rows, past // chunk * chunk)

    def call() -> object:
        held.update({name: dict(value) if isinstance(value, dict) else value for name, value in saved.items()})
        return last()

    return call


def static_call(run: Run, kind: str, context: int, rows: int) -> Callable[[], object]:
    """V4: as ``latent_call``, on the bridge's static cache. kind: this implementation."""
    from sparse_attn.integrations.transformers import static_cache

    model, past = v4(run, kind), context - rows
    cache, inputs = static_cache(model.config, context), model.inputs(run, rows, past)
    mask = mask_of(kind, rows, context, past, run.device)
    mask[..., 0] = (mask[..., 1] - model.config.sliding_window).clamp(min=0)
    held: Any = cache.layers[0]
    model.layer(*inputs, mask, cache=cache)
    for values in (held.keys, *(values for pool in held.pools.values() for values in pool.tensors())):
        values.normal_()
    layer = compiled(run, model.layer, rows)

    def call() -> object:
        held.cumulative_length.fill_(past)
        return layer(*inputs, mask, cache=cache)

    return call


class Step(NamedTuple):
    """What is timed. captured: ours is; the others run as a user runs them, the host included."""

    model: str
    ours: Callable[[Run, str, int, int], Callable[[], object]]
    theirs: Callable[[Run, str, int, int], Callable[[], object]]
    kinds: tuple[str, ...]
    prefill: bool
    captured: bool


STEPS = (
    Step("V3.2", latent_call, latent_call, ("eager", "sdpa"), prefill=False, captured=True),
    Step("V3.2", latent_call, latent_call, ("eager", "sdpa"), prefill=True, captured=True),
    Step("V4", static_call, growing_call, ("eager",), prefill=False, captured=True),
    Step("V4 on a DynamicCache", growing_call, growing_call, ("eager",), prefill=False, captured=False),
    Step("V4", growing_call, growing_call, ("eager",), prefill=True, captured=False),
)


def timed(run: Run, call: Callable[[], object], captured: bool) -> float:
    if run.dry or captured:
        return run.time([call])
    return wall_us(call, 1)


@suite("hf_bridge")
@torch.no_grad()
def hf_bridge(run: Run) -> Iterator[Record]:
    "One layer of V3.2 and of V4 in transformers, at a context of 32k: the bridge against eager, and sdpa where it is."
    from sparse_attn.integrations import transformers as bridge

    bridge.register()
    context, many = run.pick((32768, 4096), (64, 32))
    for step in STEPS:
        rows = many if step.prefill else 1
        ours = timed(run, step.ours(run, OURS, context, rows), step.captured)
        for kind in step.kinds:
            case = f"{step.model}, {rows} rows, {kind}"
            try:
                peer = timed(run, step.theirs(run, kind, context, rows), False)
            except torch.cuda.OutOfMemoryError:
                torch.cuda.empty_cache()
                peer = None
            if run.dry or peer is None:
                yield Record(case if run.dry else f"{case} has no room", ours)
            else:
                yield Record(case, ours, f"transformers {kind}", peer)
    bridge.unregister()
