"""Specs: presets, config.json in both spellings, and what is refused."""

import copy
import dataclasses

import pytest
from support.published import PUBLISHED_FLASH, PUBLISHED_GLM, PUBLISHED_V32

from sparse_attn.spec import (
    PRESETS,
    MoeSpec,
    deepseek_v32,
    from_hf_config,
    glm5,
    preset,
    shared_index_layers,
    tiny_glm5,
    tiny_v32,
)


@pytest.mark.parametrize("config, make", [(PUBLISHED_V32, deepseek_v32), (PUBLISHED_GLM, glm5)])
def test_presets_are_the_published_models(config, make):
    spec = from_hf_config(config)
    assert dataclasses.replace(spec, name=make().name) == make()


@pytest.mark.parametrize("kind", ["v32", "glm"])
def test_transformers_default_configs_are_the_presets(kind):
    import transformers

    if kind == "v32":
        config = transformers.DeepseekV32Config(rope_parameters={"rope_theta": 1e4, "rope_type": "default"})
        wanted = dataclasses.replace(deepseek_v32(), yarn=None, softmax_scale=192**-0.5, name="deepseek_v32")
    else:
        rope = {"rope_theta": 1e6, "rope_type": "default"}
        config = transformers.GlmMoeDsaConfig(rope_parameters=rope, eos_token_id=7)
        wanted = dataclasses.replace(glm5(), name="glm_moe_dsa", eos_token_ids=(7,))
    assert from_hf_config(config.to_dict()) == wanted


def test_softmax_scales():
    assert deepseek_v32().softmax_scale == pytest.approx(0.135234, rel=1e-5)
    assert glm5().softmax_scale == 0.0625
    assert deepseek_v32().index.weight_scale == pytest.approx(0.125 * 0.0883883, rel=1e-5)


def test_shared_index_layers():
    assert [i for i, own in enumerate(shared_index_layers(16, 4, 2)) if own] == [0, 1, 5, 9, 13]
    assert [i for i, own in enumerate(shared_index_layers(16, 4, 3)) if own] == [0, 1, 2, 6, 10, 14]
    assert shared_index_layers(5) == (True,) * 5
    from_pattern = from_hf_config(PUBLISHED_GLM | {"num_hidden_layers": 4, "index_topk_pattern": "FSSF"})
    assert from_pattern.index_layers == (True, False, False, True)
    longer = from_hf_config(PUBLISHED_GLM | {"num_hidden_layers": 3, "index_topk_pattern": "FSSF"})
    assert longer.index_layers == (True, False, False)
    listed = from_hf_config(PUBLISHED_GLM | {"num_hidden_layers": 2, "indexer_types": ["full", "shared"]})
    assert listed.index_layers == (True, False)
    assert listed.num_index_layers == 1


def test_presets_by_name():
    assert preset("tiny-v32") == tiny_v32() and preset("tiny_glm5") == tiny_glm5()
    published = {"deepseek_v32", "glm5", "deepseek_v4_flash", "deepseek_v4_pro"}
    assert set(PRESETS) == published | {"tiny_v32", "tiny_glm5", "tiny_v4"}
    assert not all(tiny_glm5().index_layers)
    for make in PRESETS.values():
        hash(make())
    with pytest.raises(ValueError, match="preset: got 'gpt'"):
        preset("gpt")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "llama"}, "model_type: got 'llama', allowed: deepseek_v32, glm_moe_dsa, deepseek_v4"),
        ({"hidden_act": "gelu"}, "hidden_act: got 'gelu', allowed: 'silu'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"scoring_func": "softmax"}, "scoring_func"),
        ({"kv_lora_rank": None}, "kv_lora_rank: missing"),
        ({"q_lora_rank": None}, "q_lora_rank: missing"),
        ({"rope_scaling": {"type": "linear", "factor": 2}}, "rope_type: got 'linear'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2}}, "original_max_position_embeddings: missing"),
        (
            {"rope_scaling": PUBLISHED_V32["rope_scaling"] | {"truncate": "no"}},
            "rope truncate: got 'no', allowed: true or false",
        ),
        ({"rope_theta": None}, "rope_theta: missing"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"mlp_layer_types": ["dense"]}, "mlp_layer_types"),
        ({"layer_types": ["full_attention"] * 61}, "layer_types"),
        ({"first_k_dense_replace": None}, "first_k_dense_replace: missing"),
        ({"indexer_types": ["shared"] * 61}, "index_layers: the first layer"),
        ({"index_topk_pattern": "FX"}, "index_topk_pattern: got 'FX', allowed: 61 or more times 'full'"),
        ({"n_group": 3}, "num_groups: got 3 for 256 experts"),
        ({"topk_group": 9}, "top_groups: got 9"),
        ({"num_experts_per_tok": 129}, "experts_per_token: got 129, allowed: 1 to 128"),
        ({"index_head_dim": 32}, "rope_dim: got 64"),
    ],
)
def test_refused_configs(change, message):
    config = PUBLISHED_V32 | change
    with pytest.raises(ValueError, match=message):
        from_hf_config(config)


YARN = PUBLISHED_V32["rope_scaling"]
PLAIN = {"rope_type": "default", "rope_theta": 10000}
NESTED = {"main": PLAIN, "compress": PUBLISHED_FLASH["rope_scaling"] | {"rope_theta": 160000.0}}


def read_by_transformers(config):
    """The spec that transformers reads, whatever the tables of rope in ``config`` say."""
    import transformers

    return from_hf_config(transformers.AutoConfig.for_model(**copy.deepcopy(config)).to_dict())


@pytest.mark.parametrize(
    "config, scaling, parameters, message",
    [
        (PUBLISHED_V32, YARN, PLAIN, "rope_type 'yarn' and 'default'"),
        (PUBLISHED_V32, PLAIN, YARN, "rope_type 'default' and 'yarn'"),
        (PUBLISHED_V32, YARN, YARN | {"factor": 4}, "factor 40.0 and 4.0"),
        (PUBLISHED_V32, YARN, YARN | {"mscale_all_dim": 0.5}, "softmax_scale 0.135"),
        (PUBLISHED_GLM, YARN | {"rope_theta": 5e5}, YARN | {"rope_theta": 1e6}, "rope_theta 500000.0 and 1000000.0"),
        (PUBLISHED_GLM, YARN, PLAIN | {"rope_theta": 1e6}, "'yarn' and 'default', rope_theta None and 1000000.0"),
        (PUBLISHED_FLASH, PUBLISHED_FLASH["rope_scaling"] | {"factor": 4}, NESTED, "factor 4.0 and 16.0"),
        (PUBLISHED_FLASH, PUBLISHED_FLASH["rope_scaling"], {"rope_type": "default"}, "rope_type 'yarn' and 'default'"),
    ],
)
def test_two_ropes_that_disagree_are_refused(config, scaling, parameters, message):
    both = config | {"rope_scaling": scaling, "rope_parameters": parameters}
    with pytest.raises(ValueError, match=f"config rope_scaling and rope_parameters: got .*{message}.*, allowed: one"):
        from_hf_config(both)
    first = config | {"rope_scaling": scaling, "rope_parameters": None}
    second = config | {"rope_scaling": None, "rope_parameters": parameters}
    assert read_by_transformers(both) == read_by_transformers(first) != read_by_transformers(second)


@pytest.mark.parametrize(
    "config, scaling, parameters",
    [
        (PUBLISHED_V32, YARN, YARN | {"rope_theta": 1e4, "beta_fast": None}),
        (PUBLISHED_V32, PLAIN, {"type": "default"}),
        (PUBLISHED_V32, {}, YARN),
        (PUBLISHED_V32, YARN, {}),
        (PUBLISHED_GLM, {"rope_theta": 1000000.0}, PUBLISHED_GLM["rope_parameters"]),
        (PUBLISHED_FLASH, PUBLISHED_FLASH["rope_scaling"], NESTED),
        (PUBLISHED_FLASH, NESTED, PUBLISHED_FLASH["rope_scaling"]),
    ],
)
def test_two_ropes_that_agree_are_read_as_transformers_reads_them(config, scaling, parameters):
    both = config | {"rope_scaling": scaling, "rope_parameters": parameters}
    assert from_hf_config(both) == read_by_transformers(both)


@pytest.mark.parametrize(
    "parameters, message",
    [
        (NESTED | {"rope_type": "yarn"} | YARN, "beside main and compress: got yarn"),
        ({"compress": NESTED["compress"]}, "allowed: main and compress, or neither"),
        (NESTED["compress"] | {"rope_type": "default"}, "rope type: got 'yarn', allowed: 'default', as rope_type says"),
    ],
)
def test_a_yarn_that_a_table_hides_is_refused(parameters, message):
    with pytest.raises(ValueError, match=message):
        from_hf_config(PUBLISHED_FLASH | {"rope_scaling": None, "rope_parameters": parameters})


@pytest.mark.parametrize("name", ["deepseek_sparse_attention", "indexed_attention"])
def test_old_and_new_names_of_the_attention(name):
    assert from_hf_config(PUBLISHED_V32 | {"layer_types": [name] * 61}) == from_hf_config(PUBLISHED_V32)


def test_layer_lists_must_fit():
    with pytest.raises(ValueError, match="moe_layers: got 3 entries, allowed: num_layers = 4"):
        dataclasses.replace(tiny_v32(), moe_layers=(False, True, True))


def test_end_of_text_as_none_one_or_many():
    for given, ids in ((None, ()), (7, (7,)), ([7, 9], (7, 9))):
        assert from_hf_config(PUBLISHED_V32 | {"eos_token_id": given}).eos_token_ids == ids
    assert (
        from_hf_config({key: value for key, value in PUBLISHED_V32.items() if key != "eos_token_id"}).eos_token_ids
        == ()
    )


def test_rope_starts_within_the_index_key():
    for start, message in (
        (-2, "index.rope_start: got -2"),
        (18, "rope_dim: got 16, allowed: even, and with index.rope_start 18"),
    ):
        with pytest.raises(ValueError, match=message):
            dataclasses.replace(tiny_v32(), index=dataclasses.replace(tiny_v32().index, rope_start=start))


def test_moe_score():
    with pytest.raises(ValueError, match="moe.score: got 'softmax', allowed: sigmoid"):
        dataclasses.replace(tiny_v32().moe, score="softmax")


def test_moe_spec_is_static():
    with pytest.raises(dataclasses.FrozenInstanceError):
        tiny_v32().moe.num_experts = 3
    assert isinstance(tiny_v32().moe, MoeSpec)
