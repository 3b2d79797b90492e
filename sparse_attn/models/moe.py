"""Feed-forward blocks: the gated MLP, and routed plus shared experts without a data-dependent shape.

Two ways through the routed experts, chosen by what the host knows (device, dtype, sizes), never by values:

- grouped: rows sorted by expert, two grouped GEMMs. Work is tokens x experts_per_token rows; beside it, one sort of
  that many ids. Rows of every operand are whole 16-byte pieces; on a GPU and under torch.compile they are bf16. Group
  ends stay on the device where torch has a kernel (grouped_waits); on other GPUs it copies them to the host, and a step
  waits once per product.
- dense: every expert sees every token, and experts that were not chosen weigh zero. It takes num_experts /
  experts_per_token times the necessary operations, and tokens x num_experts x (2 x intermediate + hidden) values of
  scratch. It is for few or small experts, where a sort costs more than it saves, and for what grouped cannot take.

Packed weights take ops.layers.products, which has none of these limits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from sparse_attn.framework.autocast import no_autocast
from sparse_attn.framework.lanes import by_rows
from sparse_attn.framework.target import Target
from sparse_attn.mesh import ONE_RANK, Mesh
from sparse_attn.models.norms import linear_fp32
from sparse_attn.models.products import by_ends, product
from sparse_attn.ops.layers.products import packed_experts
from sparse_attn.ops.layers.router import biased_grouped_topk, hash_routed_experts
from sparse_attn.pipeline.options import Options
from sparse_attn.pipeline.parallel.experts import combine, dispatch
from sparse_attn.pipeline.parallel.ranks import sum_over_ranks
from sparse_attn.spec import MoeSpec
from sparse_attn.weight_layout import PackedWeight, Weight, weight_shape

DENSE_MAX_EXPERTS = 16
GROUPED_BYTES = 16  # F.grouped_mm takes rows of whole pieces of that many bytes


def takes_grouped(spec: MoeSpec, hidden: int, dtype: torch.dtype, on_gpu: bool, *, mesh: Mesh = ONE_RANK) -> bool:
    """Whether tokens of ``hidden`` values take the grouped way through a rank's experts. Before torch 2.15 bf16 alone
    is compiled."""
    inner, experts = spec.intermediate_size // mesh.expert_tensor.size, spec.num_experts // mesh.expert.size
    rows = (width * dtype.itemsize for width in (hidden, inner))
    widths = all(nbytes % GROUPED_BYTES == 0 for nbytes in rows)
    takes = dtype == torch.bfloat16 or not (on_gpu or torch.compiler.is_compiling())
    return takes and experts > DENSE_MAX_EXPERTS and widths


def grouped_waits(target: Target) -> bool:
    """Whether F.grouped_mm copies group ends to the host. Only for compute capabilities 9 and 10 has torch a kernel
    that reads them on the device."""
    return target.vendor != "nvidia" or not isinstance(target.arch, int) or not 90 <= target.arch < 110


def gated(gate_up: torch.Tensor, clamp: float | None) -> torch.Tensor:
    """silu(gate) * up of [..., 2I] (gate first). clamp: gate is bounded from above, up both ways; None: unbounded."""
    gate, up = gate_up.chunk(2, dim=-1)
    if clamp is not None:
        gate, up = gate.clamp(max=clamp), up.clamp(-clamp, clamp)
    return by_rows(F.silu, gate) * up


@no_autocast
def gated_mlp(
    x: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    clamp: float | None = None,
    *,
    options: Options = Options(),
) -> torch.Tensor:
    """x [T, D], gate_up [2I, D] (gate rows first), down [D, I] -> [T, D]."""
    return product(gated(product(x, gate_up, options), clamp), down, options)


@no_autocast
def experts_dense(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    clamp: float | None = None,
    *,
    first: int | None = None,
) -> torch.Tensor:
    """x [T, D], weights fp32 and ids int32 [T, K], gate_up [E, 2I, D], down [E, D, I] -> [T, D] in x's dtype.

    first: the id of the first of these E experts, where they are a rank's; others add nothing. None: they are all.
    """
    experts = torch.arange(gate_up.shape[0], device=ids.device, dtype=ids.dtype)
    if first is not None:
        experts = experts + first
    share = (weights.unsqueeze(-1) * (ids.unsqueeze(-1) == experts)).sum(1)  # [T, E]
    inner = gated(torch.matmul(x, gate_up.transpose(1, 2)), clamp)  # [E, T, I]
    out = torch.bmm(inner, down.transpose(1, 2))  # [E, T, D]
    return (out.float() * share.t().unsqueeze(-1)).sum(0).to(x.dtype)


@no_autocast
def experts_grouped(
    x: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    gate_up: Weight,
    down: Weight,
    clamp: float | None = None,
    *,
    first: int | None = None,
    num_experts: int | None = None,
    options: Options = Options(),
) -> torch.Tensor:
    """As experts_dense, each token through its own experts alone. The sum over a token's experts has a fixed order.
    Rows of other ranks' experts come last, behind the ends of all groups, and no product reads them. Packed weights
    take an operator of their own, and num_experts is as that takes it. Where steps are batch-invariant every weight
    does, see ops.layers.products.grouped_linear."""
    if isinstance(gate_up, PackedWeight) and isinstance(down, PackedWeight):
        own = ids if first is None else ids - first
        return packed_experts(
            x,
            weights,
            own,
            gate_up,
            down,
            clamp=clamp,
            num_experts=num_experts,
            activations=options.activations,
            batch_invariant=options.batch_invariant,
            impl=options.impl,
        )
    top_k, held = ids.shape[1], None
    if first is not None:
        held = (ids >= first) & (ids < first + weight_shape(gate_up)[0])
        ids = torch.where(held, ids - first, weight_shape(gate_up)[0])
    ordered, order = torch.sort(ids.flatten(), stable=True)
    experts = torch.arange(weight_shape(gate_up)[0], device=ids.device, dtype=ids.dtype)
    ends = torch.searchsorted(ordered, experts, right=True, out_int32=True)
    rows = x[order // top_k]
    out = _product(gated(_product(rows, ends, gate_up, options), clamp), ends, down, options)
    place = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    picked = torch.unflatten(out[place], 0, (ids.shape[0], top_k))  # [T, K, D]
    if held is not None:  # a product leaves those rows as they were, with any bits
        picked = torch.where(held.unsqueeze(-1), picked, 0)
    return (picked.float() * weights.unsqueeze(-1)).sum(1).to(x.dtype)


def _product(rows: torch.Tensor, ends: torch.Tensor, weight: Weight, options: Options) -> torch.Tensor:
    if options.batch_invariant or isinstance(weight, PackedWeight):
        return by_ends(rows, ends, weight, options)
    return F.grouped_mm(rows, weight.transpose(1, 2), offs=ends)


@no_autocast
def route(
    x: torch.Tensor,
    params: dict[str, Any],
    prefix: str,
    spec: MoeSpec,
    tokens: torch.Tensor | None,
    options: Options,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(weights fp32, ids int32) [T, K] by fp32 gate logits; ``tokens`` given: the ids stand in the token's table
    row."""
    logits = linear_fp32(x, params[prefix + "gate"], options)
    if tokens is not None:
        return hash_routed_experts(
            logits,
            tokens,
            params[prefix + "table"],
            score=spec.score,
            renormalise=spec.renormalise,
            routed_scale=spec.routed_scale,
            impl=options.impl,
        )
    return biased_grouped_topk(
        logits,
        params[prefix + "bias"],
        top_k=spec.experts_per_token,
        num_groups=spec.num_groups,
        top_groups=spec.top_groups,
        score=spec.score,
        renormalise=spec.renormalise,
        routed_scale=spec.routed_scale,
        impl=options.impl,
    )


@no_autocast
def moe(
    x: torch.Tensor,
    params: dict[str, Any],
    prefix: str,
    spec: MoeSpec,
    tokens: torch.Tensor | None = None,
    *,
    mesh: Mesh = ONE_RANK,
    options: Options,
) -> torch.Tensor:
    """Routed plus shared experts: x [T, D] -> [T, D]. tokens: int [T] in a layer routed by token id.

    Every rank routes all tokens and runs its own experts for them; one sum over mesh.expert_sum adds them and the
    shared experts up. Where data ranks share experts, a rank runs them, and its part of the shared experts, for the
    rows of all (pipeline.parallel.experts). A batch-invariant token's bits on a rank depend on no other token.
    """
    weights, ids = route(x, params, prefix, spec, tokens, options)
    rows = x.shape[0]
    if mesh.expert_replicas > 1:
        x, weights, ids = dispatch(x, weights, ids, mesh)
    gate_up, down = params[prefix + "gate_up"], params[prefix + "down"]
    packed = isinstance(gate_up, PackedWeight)
    ranks = mesh.expert
    first = None if ranks.size == 1 else ranks.rank * (spec.num_experts // ranks.size)
    if packed or options.batch_invariant or takes_grouped(spec, x.shape[1], x.dtype, x.is_cuda, mesh=mesh):
        out = experts_grouped(
            x, weights, ids, gate_up, down, spec.clamp, first=first, num_experts=spec.num_experts, options=options
        )
    else:
        out = experts_dense(x, weights, ids, gate_up, down, spec.clamp, first=first)
    if spec.num_shared:
        shared = params[prefix + "shared_gate_up"], params[prefix + "shared_down"]
        out = out + gated_mlp(x, *shared, spec.clamp, options=options)
    return sum_over_ranks(out, mesh.expert_sum) if mesh.expert_replicas == 1 else combine(out, rows, mesh)
