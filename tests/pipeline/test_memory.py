"""Bytes that plan counts: of weights, those of the tensors; of a step, at least what the forward holds at its peak."""

from __future__ import annotations

import weakref
from dataclasses import replace

import pytest
import torch

from sparse_attn import build_step_plan
from sparse_attn.checkpoints import memory
from sparse_attn.checkpoints.sharding import rank_shapes
from sparse_attn.framework.target import H200
from sparse_attn.framework.torch_private import TorchDispatchMode, leaves, storage_key
from sparse_attn.mesh import Mesh, Ranks, planned_mesh
from sparse_attn.models import deepseek_v4, deepseek_v32, moe, mtp, windowed
from sparse_attn.models.params import NARROW, param_dtype, random_params
from sparse_attn.models.shapes import param_shapes, prediction_shapes, prediction_spec
from sparse_attn.pipeline import Bounds, cache_layouts, default_block_size
from sparse_attn.pipeline.options import Options
from sparse_attn.pipeline.parallel import ranks
from sparse_attn.spec import CompressedSpec, preset


@pytest.mark.parametrize("name", ("tiny_v32", "tiny_glm5", "tiny_v4"))
@pytest.mark.parametrize("dtype", (torch.float32, torch.bfloat16))
def test_weights(name, dtype):
    spec = preset(name)
    params = random_params(spec, 0, dtype=dtype)  # those in NARROW are fp32; a bf16 model of files has them in bf16
    held = sum(
        dtype.itemsize * value.numel() if name.endswith(NARROW) else value.nbytes for name, value in params.items()
    )
    found = memory.weight_bytes(spec, dtype)
    assert sum(found.values()) == held
    assert all(found[kind] for kind in ("embedding", "expert", "indexer", "attention", "other"))
    assert found["other"] < held / 2


class Held(TorchDispatchMode):
    """The most bytes that tensors made under it hold at a time."""

    def __init__(self, inputs):
        super().__init__()
        self.inputs = {storage_key(tensor) for tensor in inputs}
        self.holders, self.now, self.peak = {}, 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in leaves(out):
            if isinstance(tensor, torch.Tensor) and (key := storage_key(tensor)) not in self.inputs:
                holders = self.holders.setdefault(key, [0, tensor.untyped_storage().nbytes()])
                if not holders[0]:
                    self.now += holders[1]
                holders[0] += 1
                weakref.finalize(tensor, self.drop, key)
        self.peak = max(self.peak, self.now)
        return out

    def drop(self, key):
        self.holders[key][0] -= 1
        if not self.holders[key][0]:
            self.now -= self.holders.pop(key)[1]


def few_layers(name, **changes):
    """A layer of each kind; the others hold no more."""
    spec = preset(name)
    if isinstance(spec, CompressedSpec):
        kinds = ("window", "indexed", "full")
        return replace(spec, num_layers=3, layer_kinds=kinds, hash_layers=(True, False, False), **changes)
    layers = dict(num_layers=2, moe_layers=(False, True), index_layers=(True, True))
    return replace(spec, **layers, **changes)


def peak(spec, bounds, layouts, predicts=False):
    """Of a step at the bounds, on meta tensors: an op's outputs count, its scratch does not. predicts: of the layer of
    multi-token prediction behind it, too."""
    decodes, length = bounds.max_batch, bounds.max_model_len
    prefills = 1 if bounds.max_batched_tokens else 0
    tokens, requests = decodes * bounds.next_n + bounds.max_batched_tokens, decodes + prefills
    with torch.device("meta"), torch.no_grad():
        params = {
            name: torch.empty(shape, dtype=param_dtype(name, bounds.dtype))
            for name, shape in rank_shapes(param_shapes(spec) | prediction_shapes(spec, 1), bounds.mesh).items()
        }
        params |= {
            name: torch.empty(length, spec.rope_dim, dtype=torch.float32) for name in ("rope", "rope_compressed")
        }
        blocks = bounds.num_blocks + 1, bounds.block_size, "meta"
        rings = isinstance(spec, CompressedSpec)
        one, sizes = prediction_spec(spec), dict(requests=requests, step_rows=tokens) if rings else {}
        allocate = (deepseek_v4 if rings else deepseek_v32).allocate_caches
        caches, others = (allocate(each, layouts, *blocks, **sizes) for each in (spec, one))
        shapes = requests + 1, requests, (requests, 1)
        starts, lens, ring_table = (torch.empty(shape, dtype=torch.int32) for shape in shapes)
        blocks_of_all = bounds.block_size * bounds.mesh.context.size
        table = torch.empty(requests, -(-length // blocks_of_all), dtype=torch.int32)
        ids, slots = torch.empty(2, tokens, dtype=torch.int64)
        inputs = leaves((params, *caches, *others, starts, lens, ring_table, table, ids, slots))
        inputs = [tensor for tensor in inputs if tensor is not None]
        with Held(inputs) as held:
            kv_rows = (length if bounds.kv_rows is None else bounds.kv_rows) * prefills
            plan = build_step_plan(
                starts, lens, table, slots, num_decodes=decodes, next_n=bounds.next_n, kv_capacity=kv_rows,
                max_context=length, impl="triton",
            )  # fmt: skip
            own = {}
            if rings:
                plan, own = plan._replace(ring_table=ring_table), dict(prefill_in_place=bounds.prefill_in_place)
            found = (deepseek_v4 if rings else deepseek_v32).forward(
                params, spec, ids, caches, plan,
                layouts=layouts, impl="triton", mesh=bounds.mesh, keep_hidden=predicts, **own,
            )  # fmt: skip
            if predicts:
                mtp.predict(params, one, ids, found[1], others, plan, layouts, Options("triton"), mesh=bounds.mesh)
    return held.peak


@pytest.fixture
def as_on_a_gpu(monkeypatch):
    """Ways that the forward takes on a GPU, of bf16 and more than a few experts."""

    def choose(dtype, spec):
        way = memory.takes_grouped(spec.moe, spec.hidden_size, dtype, on_gpu=True)
        monkeypatch.setattr(moe, "takes_grouped", lambda *_, **__: way)
        product = lambda x, weight, _: x.new_empty(x.shape[0], weight.shape[0], dtype=torch.float32)  # noqa: E731
        monkeypatch.setattr(windowed, "linear_fp32", product)

    return choose


STEPS = {
    "prefill": dict(max_batch=0, max_batched_tokens=3000),
    "decode": dict(max_batch=64, max_batched_tokens=0, next_n=2),
    "both": dict(max_batch=16, max_batched_tokens=500),
    "gathering": dict(max_batch=0, max_batched_tokens=10),
}


@pytest.mark.parametrize("dtype", (torch.bfloat16, torch.float32))
@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("name", ("deepseek_v32", "glm5", "deepseek_v4_pro", "tiny_v32", "tiny_v4"))
def test_a_step_holds_no_more(name, step, dtype, as_on_a_gpu):
    """With the model's vocabulary and experts, and with so few of them that attention holds most."""
    few = dict(num_experts=17, experts_per_token=1, intermediate_size=16, num_groups=1, top_groups=1)
    for changes in ({}, dict(vocab_size=64, moe=replace(preset(name).moe, **few))):
        spec = few_layers(name, **changes)
        as_on_a_gpu(dtype, spec)
        bounds = Bounds(max_model_len=8192, dtype=dtype, block_size=default_block_size(spec), **STEPS[step])
        layouts = cache_layouts(spec, "fp8" if dtype == torch.bfloat16 else "fp32")
        bound = memory.activation_bytes(spec, bounds, H200) + memory.gathered_bytes(spec, bounds, layouts)
        held = peak(spec, bounds, layouts)
        assert held <= bound <= 2 * held, (held, bound)


@pytest.mark.parametrize("step", ("prefill", "decode", "both"))
@pytest.mark.parametrize("name", ("deepseek_v32", "glm5", "deepseek_v4_pro", "tiny_v32", "tiny_v4"))
def test_a_step_that_predicts_holds_no_more(name, step, as_on_a_gpu):
    few = dict(num_experts=17, experts_per_token=1, intermediate_size=16, num_groups=1, top_groups=1)
    for changes in ({}, dict(vocab_size=64, moe=replace(preset(name).moe, **few))):
        spec = few_layers(name, **changes)
        as_on_a_gpu(torch.bfloat16, spec)
        bounds = Bounds(max_model_len=8192, block_size=default_block_size(spec), **STEPS[step])
        layouts = cache_layouts(spec, "fp8")
        counted = (memory.activation_bytes, memory.prediction_bytes)
        bound = max(count(spec, bounds, H200) for count in counted) + memory.gathered_bytes(spec, bounds, layouts)
        held = peak(spec, bounds, layouts, predicts=True)
        assert held <= bound <= 2 * held, (held, bound)


@pytest.mark.parametrize("step", ("prefill", "decode", "both"))
@pytest.mark.parametrize("name", ("deepseek_v32", "deepseek_v4_pro"))
def test_a_step_of_a_context_rank_holds_no_more(name, step, as_on_a_gpu, monkeypatch):
    monkeypatch.setattr(ranks, "all_reduce", lambda value, group: torch.empty_like(value))
    monkeypatch.setattr(ranks, "all_gather", lambda value, size, group: value.repeat(size, *[1] * (value.dim() - 1)))
    monkeypatch.setattr(ranks, "all_to_all", lambda value, size, group: value.contiguous().clone())
    few = dict(num_experts=17, experts_per_token=1, intermediate_size=16, num_groups=1, top_groups=1)
    spec = few_layers(name, vocab_size=64, moe=replace(preset(name).moe, **few))
    as_on_a_gpu(torch.bfloat16, spec)
    bounds = Bounds(
        max_model_len=8192, block_size=default_block_size(spec), mesh=Mesh(context=Ranks(4, 1, "g")), **STEPS[step]
    )
    layouts = cache_layouts(spec, "fp8")
    bound = memory.activation_bytes(spec, bounds, H200) + memory.gathered_bytes(spec, bounds, layouts)
    held = peak(spec, bounds, layouts)
    assert held <= bound <= 2.5 * held, (held, bound)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sizes", (
    dict(tensor=4), dict(tensor=4, expert=4), dict(data=4, expert=4), dict(tensor=2, data=2, expert=4),
    dict(context=4, expert=4), dict(tensor=2, context=2, expert=4),
), ids=str)  # fmt: skip
@pytest.mark.parametrize("step", ("prefill", "decode"))
@pytest.mark.parametrize("name", ("deepseek_v32", "deepseek_v4_pro"))
def test_a_step_of_a_tensor_or_expert_rank_holds_no_more(name, step, sizes, as_on_a_gpu, monkeypatch):
    monkeypatch.setattr(ranks, "all_reduce", lambda value, group: torch.empty_like(value))
    monkeypatch.setattr(ranks, "all_gather", lambda value, size, group: value.repeat(size, *[1] * (value.dim() - 1)))
    monkeypatch.setattr(ranks, "all_to_all", lambda value, size, group: value.contiguous().clone())
    few = dict(num_experts=68, experts_per_token=1, intermediate_size=64, num_groups=1, top_groups=1)
    for changes in ({}, dict(vocab_size=64, moe=replace(preset(name).moe, **few))):
        spec = few_layers(name, **changes)
        as_on_a_gpu(torch.bfloat16, spec)
        mesh = planned_mesh(**sizes, place=1)
        bounds = Bounds(max_model_len=8192, block_size=default_block_size(spec), mesh=mesh, **STEPS[step])
        layouts = cache_layouts(spec, "fp8")
        bound = memory.activation_bytes(spec, bounds, H200) + memory.gathered_bytes(spec, bounds, layouts)
        held = peak(spec, bounds, layouts)
        assert held <= bound <= (2.5 if mesh.sharded else 2) * held, (held, bound)


def test_prefill_in_place_gathers_no_values(as_on_a_gpu):
    spec = few_layers("deepseek_v4_pro", vocab_size=64)
    as_on_a_gpu(torch.bfloat16, spec)
    bounds = Bounds(0, 20, 100_000, block_size=default_block_size(spec), prefill_in_place=True)
    layouts = cache_layouts(spec, "fp8")
    gathered = memory.gathered_bytes(spec, bounds, layouts)
    assert gathered == 25_000 * 132 and memory.gathered_bytes(spec, replace(bounds, max_batched_tokens=0), layouts) == 0
    assert peak(spec, bounds, layouts) <= memory.activation_bytes(spec, bounds, H200) + gathered
