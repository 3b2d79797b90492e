"""One attention layer of transformers with ``attn_implementation="sparse_attn"``, against its own implementations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

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


def made(layer: torch.nn.Module, run: Run) -> torch.nn.Module:
    """``layer`` with random bf16 weights where it runs; norms stay as they are."""
    layer = layer.to(run.device, torch.bfloat16).eval().requires_grad_(False)
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


def latent_call(run: Run, kind: str, context: int, rows: int) -> Callable[[], object]:
    """V3.2: the last ``rows`` of ``context`` on a static cache that holds those before."""
    from transformers import StaticCache
    from transformers.models.deepseek_v32 import modeling_deepseek_v32 as modeling

    sizes = run.pick({}, TINY_V32)
    config = modeling.DeepseekV32Config(num_hidden_layers=1, **ROPE, **sizes, attn_implementation=kind)
    layer, past = made(modeling.DeepseekV32Attention(config, 0), run), context - rows
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
        return layer(hidden, angles, mask, cache=cache, position_ids=at)

    call()
    for values in (cache.layers[0].keys, cache.layers[0].values, cache.layers[0].indexer_keys):
        values.normal_()
    return call


def windowed_call(run: Run, kind: str, context: int, rows: int) -> Callable[[], object]:
    """V4, a layer of ratio 4: as ``latent_call``, on transformers' own cache, whose state is put back each time."""
    from transformers import DynamicCache
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as modeling

    sizes = run.pick({}, TINY_V4)
    config = modeling.DeepseekV4Config(**V4_LAYER, **sizes, attn_implementation=kind)
    layer, past = made(modeling.DeepseekV4Attention(config, 0), run), context - rows
    rotary = modeling.DeepseekV4RotaryEmbedding(config).to(run.device)
    cache = DynamicCache(config=config)

    def step(count: int, before: int) -> Callable[[], object]:
        hidden = torch.randn(1, count, config.hidden_size, dtype=torch.bfloat16, device=run.device)
        at = torch.arange(before, before + count, device=run.device)[None]
        angles = {name: rotary(hidden, at, layer_type=name) for name in ("main", "compress")}
        width = min(before, config.sliding_window - 1)
        mask = mask_of(kind, count, width + count, width, run.device)
        if kind == OURS:
            mask[..., 0] = (mask[..., 1] - config.sliding_window).clamp(min=0)
        else:
            mask = mask + mask.new_full(mask.shape, torch.finfo(mask.dtype).min).tril(width - config.sliding_window)
        return lambda: layer(hidden, angles, at, mask, cache=cache)

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
    cases = (("V3.2", latent_call, ("eager", "sdpa"), True), ("V4", windowed_call, ("eager",), False))
    for model, call_of, kinds, static in cases:
        for rows in (1, many):
            ours = timed(run, call_of(run, OURS, context, rows), static)
            for kind in kinds:
                case = f"{model}, {rows} rows, {kind}"
                try:
                    peer = timed(run, call_of(run, kind, context, rows), False)
                except torch.cuda.OutOfMemoryError:
                    torch.cuda.empty_cache()
                    peer = None
                if run.dry or peer is None:
                    yield Record(case if run.dry else f"{case} has no room", ours)
                else:
                    yield Record(case, ours, f"transformers {kind}", peer)
    bridge.unregister()
