"""The spec of DeepSeek-V4: presets, config.json in both spellings, and what is refused."""

import dataclasses

import pytest
from support.published import PUBLISHED_FLASH, PUBLISHED_PRO

from sparse_attn.spec import deepseek_v4_flash, deepseek_v4_pro, from_hf_config, tiny_v4


@pytest.mark.parametrize("config, make", [(PUBLISHED_FLASH, deepseek_v4_flash), (PUBLISHED_PRO, deepseek_v4_pro)])
def test_presets_are_the_published_models(config, make):
    assert dataclasses.replace(from_hf_config(config), name=make().name) == make()


@pytest.mark.parametrize("config, make", [(PUBLISHED_FLASH, deepseek_v4_flash), (PUBLISHED_PRO, deepseek_v4_pro)])
def test_transformers_reads_the_same(config, make):
    import transformers

    theirs = transformers.DeepseekV4Config(**{key: value for key, value in config.items() if key != "model_type"})
    assert dataclasses.replace(from_hf_config(theirs.to_dict()), name=make().name) == make()


def test_ratios():
    spec = tiny_v4()
    assert [spec.ratio(layer) for layer in range(spec.num_layers)] == [0, 4, 128, 4, 128] and spec.ratios == (4, 128)
    assert dataclasses.replace(spec, layer_kinds=("window",) * 5).ratios == ()
    assert deepseek_v4_flash().layer_kinds.count("indexed") == 21


@pytest.mark.parametrize(
    "change, message",
    [
        ({"scoring_func": "sigmoid"}, "scoring_func: got 'sigmoid', allowed: 'sqrtsoftplus'"),
        ({"num_key_value_heads": 8}, "num_key_value_heads: got 8"),
        ({"compress_ratios": None}, "compress_ratios: missing"),
        ({"compress_ratios": [0] * 40}, "compress_ratios: got 40 entries, allowed: at least 43"),
        ({"compress_ratios": [0] * 42 + [16]}, r"compress_ratios: got \[16\], allowed: 0, 4, 128"),
        ({"layer_types": ["full_attention"] * 43}, "layer_types"),
        ({"num_hash_layers": None}, "num_hash_layers: missing"),
        ({"mlp_layer_types": ["dense"] * 43}, "mlp_layer_types"),
        ({"rope_scaling": {"type": "linear"}}, "rope_type: got 'linear'"),
        ({"compress_rope_theta": None}, "compress_rope_theta: missing"),
        ({"o_groups": 3}, "o_groups: got 3, allowed: a divisor of num_heads = 64"),
        ({"qk_rope_head_dim": 63}, "rope_dim: got 63"),
        ({"sliding_window": 0}, "window: got 0"),
        ({"index_head_dim": 32}, "rope_dim: got 64, allowed: at most index.head_dim = 32"),
        (
            {
                "rope_parameters": {
                    "main": {
                        "rope_type": "yarn",
                        "rope_theta": 1e4,
                        "factor": 4.0,
                        "original_max_position_embeddings": 64,
                    },
                    "compress": {"rope_theta": 1e4},
                }
            },
            "rope_parameters main: got yarn, allowed: 'default'",
        ),
    ],
)
def test_refused_configs(change, message):
    with pytest.raises(ValueError, match=message):
        from_hf_config(PUBLISHED_FLASH | change)


def test_rope_dim_as_a_part_of_the_head():
    config = PUBLISHED_FLASH | {"qk_rope_head_dim": None, "partial_rotary_factor": 0.125}
    assert from_hf_config(config) == from_hf_config(PUBLISHED_FLASH)


def test_layers_must_fit():
    for change, message in (
        (dict(layer_kinds=("window",)), "layer_kinds: got 1 entries, allowed: num_layers = 5"),
        (
            dict(layer_kinds=("window", "sparse") * 2 + ("full",)),
            r"layer_kinds: got \['full', 'sparse', 'window'\], allowed: ",
        ),
        (dict(index=dataclasses.replace(tiny_v4().index, rope_start=-2)), "index.rope_start: got -2, allowed: 0 to"),
        (dict(index=dataclasses.replace(tiny_v4().index, rope_start=100)), "index.rope_start: got 100, allowed: 0 to"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(tiny_v4(), **change)
