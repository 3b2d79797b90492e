"""Bytes of a model's weights, and bytes that a step's tensors never exceed: computed from the spec and bounds.

A step's tensors are counted as eager PyTorch holds them: what lives throughout, and the most that one stage holds
beside it. Compiled steps fuse stages and take less. Scratch of the operators is pipeline.workspace_size's.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from sparse_attn.checkpoints.formats import Entry, form_of, layout_of, nbytes_of, parts_of, predicted_of, stored_dtype
from sparse_attn.checkpoints.read import Reading
from sparse_attn.framework.target import Target
from sparse_attn.mesh import ONE_RANK, Mesh
from sparse_attn.models.moe import takes_grouped
from sparse_attn.models.params import param_dtype, stays_packed
from sparse_attn.models.shapes import prediction_spec
from sparse_attn.pipeline import Bounds, CacheLayouts
from sparse_attn.pipeline.parallel.experts import most_dispatched
from sparse_attn.pipeline.parallel.rows import shares_rows
from sparse_attn.spec import CompressedSpec, IndexSpec, MoeSpec, Spec
from sparse_attn.weight_layout import CODE_DTYPE, CODES_PER_BYTE, SCALE_DTYPE, PackedWeight, packed_bytes

FP32, INT32, INT64 = 4, 4, 8
PLAN = 24 * INT32  # of a row's, at most
COUNTS = 3 << 11  # of digits: this rank's, those of its rows joined, and the sums over ranks
KINDS = (
    ("embedding", ("embed", "lm_head")),
    ("expert", ("moe.gate_up", "moe.down")),
    ("mlp", ("mlp.gate_up", "mlp.down", "moe.shared_gate_up", "moe.shared_down")),
    ("indexer", tuple(f"index.{name}" for name in ("q_b", "k", "weights", "kv_gate"))),
    (
        "attention",
        (
            "entry.kv_gate",
            *(f"attn.{name}" for name in ("q_a", "q_b", "kv", "kv_a", "w_uk", "w_uv", "o", "o_a", "o_b")),
        ),
    ),
)


def weight_bytes(
    spec: Spec | CompressedSpec, dtype: torch.dtype, form: str = "bf16", *, predicted: int = 0, mesh: Mesh = ONE_RANK
) -> dict[str, int]:
    """Bytes of the weights that a device holds, by kind; norms, gates, tables and the like are "other".

    form: of checkpoints.formats; what it has quantised counts as packed, but for models.params.EXPANDED. dtype: of the
    others. predicted: layers of multi-token prediction, which are "mtp". mesh: whose part is counted.
    """
    made, found = form_of(spec, form), _no_bytes()
    for name, kind, shape, sources, each in parts_of(spec, made, predicted):
        layout = layout_of(kind, made)
        reading = Reading(name, shape, sources, each, layout if stays_packed(kind) else None, mesh)
        held, shape = reading.held, reading.kept.shape
        if held is not None:
            found[_kind(name)] += packed_bytes(shape, held)
        else:
            found[_kind(name)] += torch.Size(shape).numel() * param_dtype(kind, dtype, stored_dtype(kind)).itemsize
    tables = 2 if isinstance(spec, CompressedSpec) else 1
    found["other"] += tables * spec.max_positions * spec.rope_dim * FP32
    return found


def packed_weights(
    spec: Spec | CompressedSpec, form: str, *, predicted: int = 0, mesh: Mesh = ONE_RANK
) -> dict[str, PackedWeight]:
    """Those that a device holds packed, of no memory: on the meta device. Arguments: see weight_bytes."""
    made, found = form_of(spec, form), {}
    for name, kind, shape, sources, each in parts_of(spec, made, predicted):
        reading = Reading(name, shape, sources, each, layout_of(kind, made) if stays_packed(kind) else None, mesh)
        if (held := reading.held) is None:
            continue
        *leading, rows, columns = reading.kept.shape
        codes = torch.empty(
            *leading, rows, columns // CODES_PER_BYTE[held.codes], dtype=CODE_DTYPE[held.codes], device="meta"
        )
        scales = torch.empty(*leading, *held.grid(rows, columns), dtype=SCALE_DTYPE[held.scale], device="meta")
        found[name] = PackedWeight(codes, scales, held.name)
    return found


def file_bytes(spec: Spec | CompressedSpec, form: str, *, predicted: int | None = None) -> dict[str, int]:
    """Bytes of a checkpoint's weights by kind, in a form of checkpoints.formats. predicted: layers of multi-token
    prediction; None: those that the form has."""
    made, found = form_of(spec, form), _no_bytes()
    for name, kind, _, sources, each in parts_of(spec, made, predicted_of(made) if predicted is None else predicted):
        if kind != "attn.w_uv":  # kv_b holds both
            found[_kind(name)] += len(sources) * nbytes_of(Entry(name, each, kind, name, 0), made)
    return found


def _no_bytes() -> dict[str, int]:
    return {kind: 0 for kind, _ in KINDS} | {"mtp": 0, "other": 0}


def _kind(name: str) -> str:
    if name.startswith("mtp."):
        return "mtp"
    return next((kind for kind, ends in KINDS if name.endswith(ends)), "other")


def gathered_bytes(spec: Spec | CompressedSpec, bounds: Bounds, layouts: CacheLayouts) -> int:
    """Bytes of the keys that a step's prefill rows are scored against, or of those they attend to, whichever is more: a
    layer gathers one after the other. There are windows of max_batch requests."""
    if not bounds.max_batched_tokens:
        return 0
    _, kv_rows = bounds.own_keys()
    index = layouts.index.row * layouts.index.dtype.itemsize  # scales included
    value = bounds.dtype.itemsize
    if not isinstance(spec, CompressedSpec):
        return kv_rows * max(index, spec.latent_dim * value)
    ratios = [spec.ratio(layer) for layer, kind in enumerate(spec.layer_kinds) if kind != "window"]
    scored = bounds.own_keys(spec.indexed_ratio)[1] if "indexed" in spec.layer_kinds else 0
    if bounds.prefill_in_place:
        return scored * index
    windows = bounds.max_batched_tokens + max(bounds.max_batch, 1) * (spec.window - 1)
    entries = bounds.own_keys(min(ratios))[1] if ratios else 0
    copies = 2 if ratios else 1  # entries and windows, then both in one matrix
    return max(scored * index, copies * (entries + windows) * spec.head_dim * value)


def activation_bytes(spec: Spec | CompressedSpec, bounds: Bounds, target: Target) -> int:
    """What a step of the most rows holds beside weights, caches, gathered keys and scratch, at most."""
    decode, prefill = bounds.max_batch * bounds.next_n, bounds.max_batched_tokens
    if isinstance(spec, CompressedSpec):
        kept, stages = _windowed_row(spec, bounds, target)
    else:
        kept, stages = _latent_row(spec, bounds, target)
    return (decode + prefill) * (kept + max(stages)) + _rank_scores(spec, bounds)


def prediction_bytes(spec: Spec | CompressedSpec, bounds: Bounds, target: Target) -> int:
    """The same while the layer of multi-token prediction runs over a step's rows: beside what a layer holds, the
    model's logits, its hidden states, and what the layer makes of them first."""
    one, value = prediction_spec(spec), bounds.dtype.itemsize
    width = spec.hidden_size * (spec.streams if isinstance(spec, CompressedSpec) else 1)
    rows = bounds.max_batch * bounds.next_n + bounds.max_batched_tokens
    return rows * (spec.vocab_size * FP32 + 4 * width * value) + activation_bytes(one, bounds, target)


def _rank_scores(spec: Spec | CompressedSpec, bounds: Bounds) -> int:
    """What context ranks hold of all rows: scores, counts and ties, and the outputs of all of them."""
    size = bounds.mesh.context.size
    if size == 1:
        return 0
    rows = bounds.max_batch * bounds.next_n, bounds.max_batched_tokens
    ratio, value = (spec.indexed_ratio, spec.head_dim) if isinstance(spec, CompressedSpec) else (1, spec.kv_lora)
    keys, gathered = bounds.own_keys(ratio)
    outputs = sum(rows) * spec.num_heads // bounds.mesh.tensor.size * (value * bounds.dtype.itemsize + FP32)
    scores = FP32 * (rows[0] * keys + rows[1] * gathered) + sum(rows) * COUNTS * INT32
    blocks = rows[0] * -(-keys // bounds.block_size) + rows[1] * -(-gathered // bounds.block_size)
    return max(scores + (size + 3) * blocks * INT32, max(size + 1, 4) * outputs)


def _latent_row(spec: Spec, bounds: Bounds, target: Target) -> tuple[int, list[int]]:
    """(bytes a row holds throughout, bytes it holds beside in each stage)."""
    value, hidden, index, ranks = bounds.dtype.itemsize, spec.hidden_size, spec.index, bounds.mesh.tensor
    heads, parts = spec.num_heads // ranks.size, _outputs(bounds)
    kept = 3 * hidden * value + 2 * index.top_k * INT32 + PLAN  # of the layer before, too
    latents = (spec.q_lora + 2 * spec.latent_dim) * value
    query = heads * spec.qk_dim * value
    stages = [
        _norm(hidden, value),
        spec.q_lora * value + _select(index, hidden, value) + _chosen(index, bounds),
        latents + query + heads * _rotation(spec.rope_dim),
        latents + query + heads * (
            (spec.rope_dim + 2 * spec.kv_lora + spec.rope_dim + parts * spec.kv_lora) * value + parts * FP32
        ),
        latents + query + heads * (spec.rope_dim + 2 * spec.kv_lora + 2 * spec.v_dim) * value + hidden * value,
        2 * hidden * value,  # what ranks sum, and the sum
        _logits(spec, value, ranks.size),
    ]  # fmt: skip
    if not all(spec.moe_layers):
        stages.append(_mlp(spec.dense_intermediate_size // ranks.size, hidden, value))
    if any(spec.moe_layers):
        stages += _moe(spec.moe, hidden, bounds, target)
    return kept, stages


def _windowed_row(spec: CompressedSpec, bounds: Bounds, target: Target) -> tuple[int, list[int]]:
    value, hidden, index, ranks = bounds.dtype.itemsize, spec.hidden_size, spec.index, bounds.mesh.tensor
    heads, groups = spec.num_heads // ranks.size, spec.o_groups // ranks.size
    streams, dim, kinds, parts = spec.streams, spec.head_dim, set(spec.layer_kinds), _outputs(bounds)
    shared = spec.window * len(kinds | {"window"})  # indices
    if "full" in kinds:
        shared += bounds.max_model_len // spec.full_ratio
    # Of the layer's input, too, which the forward holds until it has the output.
    kept = (2 * streams + 3) * hidden * value + (streams + streams**2) * FP32 + shared * INT32 + PLAN
    latents = (spec.q_lora + 2 * dim) * value
    pooled = hidden * FP32 + 4 * dim * FP32  # as many as an overlapping compressor takes
    query = heads * dim * value
    chosen = (index.top_k + spec.window) * INT32 + _chosen(index, bounds) if "indexed" in kinds else 0
    stages = [
        _norm(hidden, value),
        (streams + 2) * hidden * value,
        latents + pooled,
        latents + 4 * index.head_dim * FP32 + _select(index, hidden, value) + chosen,
        latents + chosen + query + heads * 2 * dim * FP32,
        latents + chosen + 2 * query + heads * (_rotation(spec.rope_dim) + dim * value),
        latents + chosen + (1 + parts) * query + heads * parts * FP32,
        latents + chosen + 3 * query + heads * _rotation(spec.rope_dim),
        latents + chosen + 3 * query + (2 * groups * spec.o_lora + hidden) * value,
        _logits(spec, value, ranks.size),
        *_moe(spec.moe, hidden, bounds, target),
    ]
    return kept, stages


def _outputs(bounds: Bounds) -> int:
    """How often a row's attention output is held: a step's parts are joined where it has two."""
    return 2 if bounds.max_batch and bounds.max_batched_tokens else 1


def _widened(value: int) -> int:
    """Bytes of a value's copy in fp32."""
    return FP32 if value < FP32 else 0


def _norm(width: int, value: int) -> int:
    return 3 * width * FP32 + width * value


def _rotation(width: int) -> int:
    """Of one head, in fp32."""
    return 6 * width * FP32


def _select(index: IndexSpec, hidden: int, value: int) -> int:
    heads = index.num_heads
    return hidden * FP32 + 2 * heads * (index.head_dim * value + FP32) + 8 * index.head_dim * FP32


def _chosen(index: IndexSpec, bounds: Bounds) -> int:
    """Positions, and those that tensor ranks gather and put in order where they share rows."""
    return (4 if shares_rows(bounds.max_model_len, bounds.mesh.tensor) else 1) * index.top_k * INT32


def _logits(spec: Spec | CompressedSpec, value: int, ranks: int) -> int:
    """In the model's dtype, then in fp32; beside the last norm's input and output. Ranks gather theirs, and put them
    side by side."""
    if ranks == 1:
        return spec.vocab_size * (value + _widened(value)) + 2 * spec.hidden_size * value
    own = -(-spec.vocab_size // ranks)
    joined = (own + 2 * ranks * own) * value, (own + ranks * own) * value + spec.vocab_size * FP32
    return max(joined) + 2 * spec.hidden_size * value


def _mlp(inner: int, hidden: int, value: int) -> int:
    """Gate and up, what becomes of them, and the output beside the sum it is added to."""
    return (5 * inner + 2 * hidden) * value


def _moe(moe: MoeSpec, hidden: int, bounds: Bounds, target: Target) -> Iterator[int]:
    """Of all experts that a token takes: a rank holds rows for those of other ranks, too, which it computes nothing
    of."""
    mesh, value, top_k = bounds.mesh, bounds.dtype.itemsize, moe.experts_per_token
    yield hidden * FP32 + moe.num_experts * 2 * FP32
    if mesh.expert_replicas == 1 and (mesh.sharded is None or mesh.sharded.expert_replicas == 1):
        yield from _experts(moe, hidden, bounds, target)
        return
    decode, prefill = bounds.max_batch * bounds.next_n, bounds.max_batched_tokens
    rows = max(1, decode + prefill)
    each = -(-most_dispatched(decode, prefill, mesh) // rows)  # rows at the experts for one of a step
    sent = hidden * value + 2 * top_k * FP32
    yield hidden * value + (1 + 2 * each) * sent
    yield from (hidden * value + each * stage for stage in _experts(moe, hidden, bounds, target))
    yield hidden * value + each * hidden * (2 * value + FP32)


def _experts(moe: MoeSpec, hidden: int, bounds: Bounds, target: Target) -> Iterator[int]:
    """Behind the router, of one row that a rank runs its experts for."""
    mesh, value, top_k = bounds.mesh, bounds.dtype.itemsize, moe.experts_per_token
    inner, experts = moe.intermediate_size // mesh.expert_tensor.size, moe.num_experts // mesh.expert.size
    routed = top_k * (FP32 + INT32)
    copies = 3 if mesh.expert.size == 1 else 4  # of what experts give; one without that of other ranks' experts
    if mesh.expert_sum.size > 1:
        routed += top_k * (INT32 + 1) + 2 * hidden * value
    if takes_grouped(moe, hidden, bounds.dtype, target.vendor != "cpu", mesh=mesh):
        routed += top_k * (INT32 + 2 * INT64)
        yield routed + top_k * (hidden + 5 * inner) * value
        yield (
            routed
            + top_k * ((copies * hidden + inner) * value + hidden * (_widened(value) + FP32))
            + hidden * (FP32 + value)
        )
    else:
        routed += experts * FP32
        yield routed + top_k * experts * 2 * FP32
        yield routed + experts * (hidden + 5 * inner) * value
        yield (
            routed + experts * ((hidden + inner) * value + hidden * (_widened(value) + FP32)) + hidden * (FP32 + value)
        )
    yield routed + hidden * value + _mlp(moe.num_shared * moe.intermediate_size // mesh.expert_sum.size, hidden, value)
