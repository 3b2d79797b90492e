"""The workspace of given bounds, computed from the row counts at which an op's scratch can be largest: that of all of
them."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace

import pytest
import torch

from sparse_attn import workspace
from sparse_attn.checkpoints.memory import packed_weights
from sparse_attn.framework.target import H200, Target
from sparse_attn.layout import LatentFp8Layout
from sparse_attn.mesh import planned_mesh
from sparse_attn.ops.attention.sparse import dispatch as attention
from sparse_attn.ops.attention.sparse.problem import packed_decode
from sparse_attn.ops.layers.products import dispatch as linears
from sparse_attn.ops.layers.products.problem import Problem
from sparse_attn.ops.ragged.lists import config as ragged_config
from sparse_attn.pipeline import Bounds, bounds, cache_layouts, workspace_size
from sparse_attn.pipeline.options import Options
from sparse_attn.pipeline.products import product_scratches
from sparse_attn.spec import PRESETS, CompressedSpec, preset
from sparse_attn.testing.launches import TARGETS
from sparse_attn.weight_layout import PackedWeight, parse_weight_layout


def attended(part, limits, rows, indices):
    return part.attention(rows, part.heads, part.layout, indices, limits.dtype, limits.batch_invariant)


def every_scratch(part, limits, target):
    """What every op asks for at every row count there is."""
    yield from attention.reserved(attended(part, limits, 0, 0), target)
    for rows in range(part.group, part.most + 1, part.group):
        yield ragged_config.scratch(rows, target)
        for most in part.attended:
            for machine in attention.MACHINES:
                yield from machine.reserved(attended(part, limits, rows, rows * most), target)
        for keys in {part.keys, min(part.keys, 262144)} - {0}:  # the widest with group maxima
            yield part.select_scratch(rows, keys, part.top_k, limits.logits_bytes, target, part.group)
        narrow = limits.logits_bytes // (4 * rows) // 64 * 64
        if 0 < narrow < part.keys:
            yield part.select_scratch(part.most, narrow, part.top_k, limits.logits_bytes, target, part.group)


def drawn(seed):
    """Bounds around the sizes at which launches change, on machines of a few multiprocessors and real ones."""
    draw = random.Random(seed)
    spec = preset(draw.choice(sorted(PRESETS)))
    target = draw.choice(
        [*TARGETS.values(), H200, Target("nvidia", 90, 3, 232448), Target("amd", "gfx942", 5, 65536, 64)]
    )
    length = min(draw.choice((1, 64, 100, 4096, 8193, 33000, 163840, 1 << 20)) + draw.randrange(3), spec.max_positions)
    limits = Bounds(
        max_batch=draw.choice((0, 1, 7, 64, 133, 300)), max_batched_tokens=draw.choice((0, 1, 65, 128, 270, 700)),
        max_model_len=length, next_n=draw.choice((1, 1, 2, 3)), kv_rows=draw.choice((None, 0, 70, 40_000, 600_000)),
        logits_bytes=draw.choice((0, 1000, 1 << 20, 7 << 20, 1 << 26, 1 << 29)),
        dtype=draw.choice((torch.bfloat16, torch.float32)), prefill_in_place=draw.random() < 0.5, batch_invariant=draw.random() < 0.3,
    )  # fmt: skip
    return spec, limits, target, cache_layouts(spec, draw.choice(("fp8", "bf16")))


def by_enumeration(spec, limits, target, layouts):
    kind = bounds._windowed if isinstance(spec, CompressedSpec) else bounds._latent
    return workspace.largest(
        workspace.size_of(scratch)
        for part in kind(spec, limits, layouts)
        for scratch in every_scratch(part, limits, target)
    )


@pytest.mark.parametrize("seed", range(24))
def test_no_row_count_takes_more(seed):
    spec, limits, target, layouts = drawn(seed)
    assert workspace_size(spec, limits, target, layouts) == by_enumeration(spec, limits, target, layouts)


@pytest.mark.parametrize("step", range(1, 6))
@pytest.mark.parametrize("num_sms", (5, 7, 13))
def test_rows_beyond_those_that_are_asked_take_no_more_partials(num_sms, step):
    """At every number of keys, by step and SMs: which rows take the most depends on both."""
    target = Target("nvidia", 90, num_sms, 232448)
    rows = range(step, 6 * num_sms + 1, step)  # behind MOST_WAVES full ones, too
    for heads, keys in itertools.product((16, 64, 192), (384, 512, 640, 1664, 2112, 3648)):
        problem = packed_decode(rows[-1], heads, LatentFp8Layout(512, 64), rows[-1] * keys)
        some = (problem._replace(tokens=count, indices=count * keys) for count in rows)
        every = (scratch for one in some for machine in attention.MACHINES for scratch in machine.reserved(one, target))
        asked = workspace.largest(map(workspace.size_of, attention.reserved(problem, target, step)))
        assert asked.nbytes == workspace.largest(map(workspace.size_of, every)).nbytes


@pytest.mark.parametrize("name", ("deepseek_v32", "deepseek_v4_pro"))
def test_large_bounds_ask_few_sizes(name, monkeypatch):
    spec = preset(name)
    limits = Bounds(1 << 16, 1 << 22, spec.max_positions, next_n=2, logits_bytes=1 << 34, prefill_in_place=True)
    asked = itertools.count()
    size_of = workspace.size_of
    monkeypatch.setattr(workspace, "size_of", lambda scratch: (next(asked), size_of(scratch))[1])
    size = workspace_size(spec, limits, H200)
    assert 100 < next(asked) < 50_000  # 18,206 and 23,922 when written; there are four million rows
    assert size == workspace_size(spec, replace(limits, max_batched_tokens=(1 << 22) - 1), H200)._replace(
        counters=size.counters
    )


@pytest.mark.parametrize(
    "spec", [preset("deepseek_v32"), replace(preset("deepseek_v32"), num_heads=16), preset("deepseek_v4_flash")]
)
def test_workspace_of_batch_invariant_steps_grows_by_rows(spec):
    """Every row is split as one of 32 is: so many more rows take as many times the scratch, which default steps do
    not."""

    def attention(rows, invariant):
        bounds = Bounds(rows, 0, 4096, logits_bytes=0, block_size=256, batch_invariant=invariant)
        return workspace_size(spec, bounds, H200).nbytes

    assert attention(32, True) > 1 << 20
    assert attention(320, True) == 10 * attention(32, True) > attention(320, False)


PUBLISHED = [("deepseek_v32", "published"), ("deepseek_v4_flash", "published"), ("deepseek_v4_flash", "flash-base")]


@pytest.mark.few(6)
@pytest.mark.parametrize("target", ["sm_90", "sm_120", "gfx942"])
@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize("activations", ["exact", "fp8"])
@pytest.mark.parametrize("name, form", PUBLISHED)
def test_products_of_no_row_count_take_more(name, form, activations, invariant, target):
    spec = preset(name)
    weights = packed_weights(spec, form, predicted=1, mesh=planned_mesh(tensor=8, expert=8))

    def asked(most, activations=activations):
        found = product_scratches(
            weights,
            spec.moe.experts_per_token,
            spec.moe.num_experts,
            most,
            TARGETS[target],
            dtype=torch.bfloat16,
            options=Options(batch_invariant=invariant, activations=activations),
        )
        return workspace.largest(map(workspace.size_of, found))

    most = asked(3000)
    for rows in (1, 63, 129, 170, 171, 255, 257, 300, 512, 513, 700, 1111, 1500, 2999):
        size = asked(rows)
        assert size.nbytes <= most.nbytes and size.counters <= most.counters
    limits = Bounds(64, 2936, 4096, prefill_activations=activations, batch_invariant=invariant)
    whole, without = (workspace_size(spec, limits, TARGETS[target], weights=given) for given in (weights, None))
    assert whole == workspace.largest((without, most, asked(64, "exact")))
    decoding = replace(limits, max_batched_tokens=0)
    whole, without = (workspace_size(spec, decoding, TARGETS[target], weights=given) for given in (weights, None))
    assert whole == workspace.largest((without, asked(64, "exact")))


@pytest.mark.parametrize("activations", ["exact", "fp8"])
@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4_flash"])
def test_no_linear_of_fewer_rows_takes_more(name, activations):
    """Each alone, whole: beside experts the scratch of most of them is small."""
    weights = {key: value for key, value in packed_weights(preset(name), "published").items() if ".moe." not in key}
    for value in {(weight.codes.shape, weight.layout): weight for weight in weights.values()}.values():

        def asked(most, value=value):
            some = dict(dtype=torch.bfloat16, options=Options(activations=activations))
            return workspace.largest(
                map(workspace.size_of, product_scratches({"w": value}, 8, 256, most, H200, **some))
            )

        most = asked(4096)
        for rows in (129, 448, 449, 512, 896, 897, 1024, 1025, 1500, 2048, 3000, 4095):
            size = asked(rows)
            assert size.nbytes <= most.nbytes and size.counters <= most.counters


@pytest.mark.parametrize("most", [460, 511, 512, 540, 567, 568, 2000])
@pytest.mark.parametrize("name, k", [("deepseek_v4_flash", 6), ("deepseek_v4_flash", 8), ("deepseek_v4_pro", 6)])
def test_experts_of_fewer_rows_take_no_more_where_another_kernel_runs(name, k, most):
    """Up to 12 ids an expert `sorted` runs on Hopper, which brings rows in order beside what `hopper` needs."""
    weights, count = packed_weights(preset(name), "published"), preset(name).moe.num_experts

    def asked(most):
        found = product_scratches(weights, k, count, most, H200, dtype=torch.bfloat16, options=Options())
        return workspace.largest(map(workspace.size_of, found)).nbytes

    experts = {key: value for key, value in weights.items() if key.endswith(("moe.gate_up", "moe.down"))}
    whole = asked(most)
    for tokens in (257, 383, 384, 455, 461, 462, 500, 510, 511, 512, 767, 768, 800):
        if tokens < most:
            only = product_scratches(experts, k, count, tokens, H200, dtype=torch.bfloat16, options=Options())
            assert max(workspace.size_of(scratch).nbytes for scratch in only) <= whole


def test_expert_scratch_is_what_a_step_holds_between_its_products():
    spec = preset("deepseek_v4_flash")
    weights = packed_weights(spec, "published")
    tokens, k, hidden, inner = 4096, spec.moe.experts_per_token, spec.hidden_size, spec.moe.intermediate_size
    found = product_scratches(weights, k, spec.moe.num_experts, tokens, H200, dtype=torch.bfloat16, options=Options())
    most = max(workspace.size_of(scratch).nbytes for scratch in found)
    held = 2 * tokens * k * (inner + hidden)
    assert held < most < 1.01 * held


def test_a_weight_of_one_group_is_multiplied_as_one_of_several():
    """By ends, which take a tile more: a rank's only group of V4's output projection."""
    layout = parse_weight_layout("e4m3/128x128/e8m0")
    codes = torch.empty(1, 1024, 4096, dtype=torch.uint8, device="meta")
    weight = PackedWeight(codes, torch.empty(1, 8, 32, dtype=torch.uint8, device="meta"), layout.name)
    found = list(product_scratches({"o_a": weight}, 6, 256, 64, H200, dtype=torch.bfloat16, options=Options()))
    facts = dict(codes=layout.codes, scale=layout.scale, block=layout.block)
    by_ends, whole = (
        [linears.choose(Problem(rows, 1, 1024, 4096, torch.bfloat16, ends, **facts), H200).plan.scratch
         for rows in range(1, 65)] for ends in (True, False)
    )  # fmt: skip
    assert found == by_ends != whole


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("rows", [200, 700])
def test_keys_that_are_decoded_once(rows, ranks):
    """Scratch of prefill scores over an MXFP4 index cache, where so many rows and keys take it."""
    spec, target = preset("deepseek_v4_flash"), H200
    mesh = planned_mesh(context=ranks)
    limits = Bounds(7, rows, 160_000, block_size=256, kv_rows=400_000, logits_bytes=1 << 28, mesh=mesh)
    fp8, mxfp4 = (cache_layouts(spec, "fp8", index_kind=kind) for kind in ("fp8", "mxfp4"))
    size = workspace_size(spec, limits, target, mxfp4)
    assert size == by_enumeration(spec, limits, target, mxfp4)
    assert (size != workspace_size(spec, limits, target, fp8)) == (rows == 700 and ranks == 1)
