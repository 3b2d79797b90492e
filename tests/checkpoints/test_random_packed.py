"""Random packed weights: what a checkpoint of the same form loads as, without the checkpoint."""

from __future__ import annotations

import pytest
import torch

from sparse_attn import Model, cache_layouts, generate
from sparse_attn.checkpoints.load import load
from sparse_attn.checkpoints.published import write_published
from sparse_attn.checkpoints.random_packed import random_packed_params
from sparse_attn.checkpoints.share import share_of
from sparse_attn.checkpoints.weights_to_device import is_finite
from sparse_attn.spec import preset
from sparse_attn.weight_layout import PackedWeight, dequantise, weight_shape


def said(weight):
    tensors = weight[:2] if isinstance(weight, PackedWeight) else (weight,)
    return weight_shape(weight), [(tensor.dtype, tensor.shape) for tensor in tensors], getattr(weight, "layout", None)


@pytest.mark.parametrize(("name", "form"), (("tiny_v4", "published"), ("tiny_v32", "fp8-e8m0")))
def test_random_packed_weights_are_those_that_a_checkpoint_loads_as(name, form, tmp_path):
    spec = preset(name)
    write_published(tmp_path, spec, form)
    wanted, found = load(tmp_path, expand=False)[1], random_packed_params(spec, 0, form=form)
    assert {key: said(weight) for key, weight in found.items()} == {key: said(wanted[key]) for key in wanted}
    packed = {key: weight for key, weight in found.items() if isinstance(weight, PackedWeight)}
    assert len(packed) > 10
    for key, weight in packed.items():
        assert is_finite(weight), key
        assert 0.5 < dequantise(weight).square().mean().sqrt() * weight_shape(weight)[-1] ** 0.5 < 2, key


@pytest.mark.parametrize("name", ("tiny_v4", "tiny_glm5"))
def test_a_rank_share_of_random_packed_weights_decodes(name):
    spec = share_of(preset(name), 2)
    model = Model(spec, random_packed_params(spec, 0), cache_layouts(spec, "fp8"))
    result = generate(model, [[1, 2, 3]], max_new_tokens=2, keep_logits=True)
    assert len(result.tokens[0]) == 2 and torch.isfinite(result.logits[0]).all()
