"""Checkpoint folders we write: read back bit for bit, by models.loading and by transformers."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from sparse_attn.models.loading import load
from sparse_attn.models.params import INTEGER_NAMES, param_dtype, random_params
from sparse_attn.models.saving import save
from sparse_attn.spec import PRESETS, YarnSpec, from_hf_config, preset, tiny_v4, tiny_v32, to_hf_config

TINY = ("tiny_v32", "tiny_glm5", "tiny_v4")


@pytest.mark.parametrize("name", PRESETS)
def test_config_says_the_whole_spec(name):
    spec = preset(name)
    assert replace(from_hf_config(to_hf_config(spec)), name=name) == spec


@pytest.mark.parametrize(
    "spec, field",
    [
        (replace(tiny_v32(), softmax_scale=0.3, yarn=None), "softmax_scale"),
        (replace(tiny_v32(), latent_norm_eps=1e-3), "latent_norm_eps"),
        (replace(tiny_v4(), softmax_scale=1.0), "softmax_scale"),
        (replace(tiny_v4(), index=replace(tiny_v4().index, hadamard=True)), "index"),
    ],
)
def test_what_no_config_says_is_refused(spec, field):
    with pytest.raises(ValueError, match=f"spec: got {field} that no config.json"):
        to_hf_config(spec)


def test_other_yarns():
    for spec in (tiny_v32(), tiny_v4()):
        other = replace(spec, yarn=YarnSpec(7.0, 100, 16.0, 2.0, 1.1))
        if spec.name == "tiny_v32":
            other = replace(other, softmax_scale=0.123456)
            assert abs(from_hf_config(to_hf_config(spec)).softmax_scale - spec.softmax_scale) == 0
            other = replace(other, softmax_scale=from_hf_config(_with_scale(other)).softmax_scale)
        assert replace(from_hf_config(to_hf_config(other)), name=other.name) == other


def _with_scale(spec):
    """A config of about the spec's scale: mscale_all_dim has twelve decimals."""
    from sparse_attn.spec.parts import mscale_of

    config = to_hf_config(replace(tiny_v32(), yarn=None, softmax_scale=spec.qk_dim**-0.5))
    both = mscale_of(spec.softmax_scale, spec.qk_dim, spec.yarn.factor)
    rope = dict(rope_type="yarn", rope_theta=1e4, factor=7.0, original_max_position_embeddings=100, mscale=both,
                mscale_all_dim=both, beta_fast=16.0, beta_slow=2.0, attention_factor=1.1)  # fmt: skip
    return config | {"rope_parameters": rope}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", TINY)
def test_round_trip(tmp_path, name, tied):
    spec = replace(preset(name), tie_embeddings=tied)
    params = random_params(spec, seed=3)
    for dtype in (torch.float32, torch.bfloat16):
        folder = tmp_path / str(dtype)
        size = save(folder, spec, params, dtype)
        assert size == sum(value.nbytes for value in load_file(folder / "model.safetensors").values())
        found, loaded = load(folder, dtype=dtype)
        assert replace(found, name=name) == spec and loaded.keys() == params.keys()
        for key, value in params.items():
            wanted = value if key.startswith("rope") else value.to(param_dtype(key, dtype))
            assert torch.equal(loaded[key], wanted), key


@pytest.mark.parametrize("name", TINY)
def test_transformers_reads_it(tmp_path, name):
    import transformers

    spec = preset(name)
    params = random_params(spec, seed=5)
    save(tmp_path, spec, params, torch.float32)
    _, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert any(key.endswith(INTEGER_NAMES) for key in params) == (name == "tiny_v4")


def test_missing_and_misshaped_weights_are_named(tmp_path):
    spec = tiny_v32()
    params = random_params(spec, seed=1)
    with pytest.raises(ValueError, match="weight layers.0.attn.w_uk: got shape"):
        save(tmp_path, spec, params | {"layers.0.attn.w_uk": torch.zeros(2, 3, 4)})
    del params["layers.1.index.k"]
    with pytest.raises(ValueError, match="weight layers.1.index.k: missing"):
        save(tmp_path, spec, params)
