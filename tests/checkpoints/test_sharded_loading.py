"""Each rank reads its own part of a checkpoint's files: the same as a part of the whole weights, and nothing else."""

from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from sparse_attn.checkpoints.load import load
from sparse_attn.checkpoints.memory import weight_bytes
from sparse_attn.checkpoints.published import write_published
from sparse_attn.checkpoints.sharding import kept_of, shard
from sparse_attn.mesh import planned_mesh
from sparse_attn.models.shapes import param_shapes
from sparse_attn.spec import preset
from sparse_attn.weight_layout import PackedWeight, dequantise, weight_shape
from sparse_attn.weight_layout import weight_bytes as bytes_of

FORMS = [(name, form) for name in ("tiny_v32", "tiny_glm5", "tiny_v4") for form in ("published", "bf16")]
GRIDS = ({"tensor": 2}, {"tensor": 2, "expert": 2}, {"context": 4, "expert": 4})


@pytest.mark.parametrize(("name", "form"), FORMS)
def test_parts_of_every_form(name, form, tmp_path):
    spec = preset(name)
    write_published(tmp_path, spec, form)
    _, whole = load(tmp_path)
    for grid in GRIDS:
        for place in range(max(grid.values())):
            mesh, told = planned_mesh(**grid, place=place), []
            _, held = load(tmp_path, mesh=mesh, progress=lambda nbytes, total: told.append((nbytes, total)))
            assert list(held) == list(whole)
            for one, weight in held.items():
                if one not in param_shapes(spec):
                    continue
                want = shard(one, whole[one], mesh)
                assert isinstance(weight, PackedWeight) == isinstance(want, PackedWeight), one
                assert torch.equal(dequantise(weight), dequantise(want)), (one, grid, place)
            expected = weight_bytes(spec, torch.bfloat16, form, mesh=mesh)
            assert sum(map(bytes_of, held.values())) == sum(expected.values())
            everywhere = [one for one in held if weight_shape(held[one]) == weight_shape(whole[one])]
            rest = sum(bytes_of(whole[one]) for one in held if one not in everywhere)
            padding = 2 * bytes_of(held["embed"][:1])
            most = sum(bytes_of(whole[one]) for one in everywhere) + rest / max(grid.values()) + padding
            scales = sum(
                bytes_of(value) - value.codes.nbytes for value in held.values() if isinstance(value, PackedWeight)
            )
            assert sum(expected.values()) <= most + scales, (
                "more than what lies everywhere and a rank's part of the rest"
            )
            assert sum(nbytes for nbytes, _ in told) == told[0][1]


def test_nothing_of_other_ranks_is_read(tmp_path):
    """Their parts hold NaN, which a rank refuses where it reads any."""
    spec = preset("tiny_v32")
    write_published(tmp_path, spec, "bf16")
    mesh = planned_mesh(tensor=2, expert=2)
    _, whole = load(tmp_path, dtype=torch.float32)
    layer, heads = "model.layers.1.", spec.num_heads // 2
    others = {
        "model.embed_tokens.weight": (slice(129, None),),
        "lm_head.weight": (slice(129, None),),
        layer + "self_attn.q_b_proj.weight": (slice(heads * spec.qk_dim, None),),
        layer + "self_attn.kv_b_proj.weight": (slice(heads * (spec.nope_dim + spec.v_dim), None),),
        layer + "self_attn.o_proj.weight": (slice(None), slice(heads * spec.v_dim, None)),
        "model.layers.0.mlp.gate_proj.weight": (slice(128, None),),
        "model.layers.0.mlp.down_proj.weight": (slice(None), slice(128, None)),
        layer + "mlp.experts.4.up_proj.weight": (slice(None),),
        layer + "mlp.experts.7.down_proj.weight": (slice(None),),
        layer + "mlp.shared_experts.up_proj.weight": (slice(32, None),),
    }
    files = sorted(tmp_path.glob("*.safetensors"))
    for path in files:
        tensors = load_file(path)
        for name in tensors.keys() & others.keys():
            tensors[name][others.pop(name)] = torch.nan
        save_file(tensors, path)
    assert not others
    _, held = load(tmp_path, dtype=torch.float32, mesh=mesh)
    for name in param_shapes(spec):
        assert torch.equal(held[name], shard(name, whole[name], mesh)), name
    with pytest.raises(ValueError, match="NaN"):
        load(tmp_path, mesh=planned_mesh(tensor=2, expert=2, place=1))


@pytest.mark.parametrize("name", ("deepseek_v32", "glm5", "deepseek_v4_flash", "deepseek_v4_pro"))
def test_a_rank_of_eight_holds_an_eighth_of_what_is_sharded(name):
    """Of the published form: at most what lies on every rank, and the rest / 8."""
    spec = preset(name)
    whole = weight_bytes(spec, torch.bfloat16, "published")
    for expert in (1, 8):
        mesh = planned_mesh(tensor=8, expert=expert)
        held = weight_bytes(spec, torch.bfloat16, "published", mesh=mesh)
        shapes = param_shapes(spec)
        same = sum(math.prod(shape) for one, shape in shapes.items() if kept_of(one, shape, mesh).shape == shape)
        assert held["expert"] * 8 == whole["expert"] and held["mlp"] * 8 == whole["mlp"]
        assert held["embedding"] * 8 == whole["embedding"] and held["indexer"] == whole["indexer"]
        assert same < 0.03 * sum(map(math.prod, shapes.values()))
