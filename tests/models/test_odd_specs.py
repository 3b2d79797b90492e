"""Odd specs, written and read back: by us as they were, by transformers as the same model, or refused."""

import random
from dataclasses import fields, replace

import pytest
import torch
from support.parity import stable_topk

from sparse_attn import Model, generate
from sparse_attn.checkpoints.load import load
from sparse_attn.checkpoints.save import save
from sparse_attn.models.params import random_params
from sparse_attn.ops.layers.rope import Yarn
from sparse_attn.ops.layers.rope.table import inverse_frequencies
from sparse_attn.pipeline import cache_layouts
from sparse_attn.spec import (
    CompressedSpec,
    IndexSpec,
    MoeSpec,
    Spec,
    YarnSpec,
    from_hf_config,
    softmax_scale,
    tiny_v4,
    tiny_v32,
    to_hf_config,
)

TOKENS = 45


def odd_yarn(draw, truncate):
    if draw.random() < 0.4:
        return None
    return YarnSpec(
        draw.choice((1.5, 4.0, 40.0)), draw.choice((16, 64, 333)), draw.choice((32.0, 7.5)), draw.choice((1.0, 0.3)),
        draw.choice((1.0, 1.1)), truncate,
    )  # fmt: skip


def latent(seed):
    draw = random.Random(seed)
    layers, groups = draw.randint(1, 3), draw.choice((1, 2))
    interleaved = draw.random() < 0.5
    rope, nope = draw.choice((2, 6, 8)), draw.choice((5, 12, 24))
    yarn = odd_yarn(draw, draw.random() < 0.5)
    all_dim = draw.choice((0.0, 1.0, 0.7)) if yarn else 0.0
    routed = tuple(draw.random() < 0.6 for _ in range(layers))
    return Spec(
        name="odd", vocab_size=draw.randint(20, 70), hidden_size=draw.choice((24, 40)), num_layers=layers,
        num_heads=draw.choice((1, 3, 5)), q_lora=draw.choice((16, 25)), kv_lora=draw.choice((16, 32)), nope_dim=nope,
        rope_dim=rope, v_dim=draw.choice((9, 16)),
        index=IndexSpec(draw.choice((1, 3)), draw.choice((8, 17)), draw.choice((3, 16, 100)), interleaved),
        moe=MoeSpec(4 * groups, draw.choice((1, 2)), groups, draw.randint(1, groups), draw.choice((1.0, 2.5)),
                    draw.random() < 0.5, draw.choice((0, 1, 2)), draw.choice((8, 19))),
        dense_intermediate_size=draw.choice((21, 32)), moe_layers=routed,
        index_layers=(True, *(not interleaved or draw.random() < 0.5 for _ in range(layers - 1))),
        max_positions=512, rope_theta=draw.choice((50.0, 1e4)), yarn=yarn,
        softmax_scale=softmax_scale(nope + rope, yarn.factor if yarn else 1.0, all_dim),
        rms_eps=draw.choice((1e-6, 1e-3)), tie_embeddings=draw.random() < 0.3, eos_token_ids=draw.choice(((), (3,), (1, 2))),
    )  # fmt: skip


def compressed(seed):
    draw = random.Random(seed)
    layers = draw.randint(1, 3)
    head, index = draw.choice(((98, 22), (22, 18), (30, 16))), draw.choice((1, 2))
    groups = draw.choice((1, 2, 3))
    rope = draw.choice((2, 6, 14))
    return CompressedSpec(
        name="odd", vocab_size=draw.randint(20, 70), hidden_size=draw.choice((24, 40)), num_layers=layers,
        num_heads=groups * draw.choice((1, 2)), q_lora=draw.choice((16, 25)), head_dim=head[0], rope_dim=rope,
        window=draw.choice((2, 7, 60)), layer_kinds=tuple(draw.choice(("window", "indexed", "full")) for _ in range(layers)),
        index=IndexSpec(index, head[1], draw.choice((1, 3, 100)), True, rope_start=head[1] - rope),
        moe=MoeSpec(draw.choice((3, 6)), draw.choice((1, 3)), 1, 1, draw.choice((1.0, 1.5)), True, 1, draw.choice((8, 19)),
                    "sqrtsoftplus", draw.choice((0.5, 10.0))),
        hash_layers=tuple(draw.random() < 0.4 for _ in range(layers)), o_groups=groups, o_lora=draw.choice((5, 16)),
        max_positions=512, rope_theta=draw.choice((50.0, 1e4)), compressed_rope_theta=draw.choice((90.0, 1.6e5)),
        softmax_scale=head[0] ** -0.5, yarn=odd_yarn(draw, True), indexed_ratio=draw.choice((2, 4, 5)), full_ratio=draw.choice((8, 9)),
        streams=draw.choice((1, 3, 4)), sinkhorn_iterations=draw.choice((1, 5)), rms_eps=draw.choice((1e-6, 1e-3)),
        tie_embeddings=draw.random() < 0.3, eos_token_ids=draw.choice(((), (3,), (1, 2))),
    )  # fmt: skip


def their_logits(folder, tokens):
    import transformers

    model, info = transformers.AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        experts_implementation="eager",
        output_loading_info=True,
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(torch.Tensor, "topk", stable_topk)
        return model.eval()(torch.tensor([tokens])).logits[0], model


def check_frequencies(spec, model):
    """The rotations of transformers' model to the last bits, which so few tokens would not tell."""
    rotary, yarn = model.model.rotary_emb, spec.yarn and Yarn(**vars(spec.yarn))
    if isinstance(spec, CompressedSpec):
        found = {"main": (spec.rope_theta, None), "compress": (spec.compressed_rope_theta, yarn)}
        pairs = [
            (getattr(rotary, f"{kind}_inv_freq"), getattr(rotary, f"{kind}_attention_scaling"), *ours)
            for kind, ours in found.items()
        ]
    else:
        pairs = [(rotary.inv_freq, rotary.attention_scaling, spec.rope_theta, yarn)]
    for frequencies, scale, theta, ramp in pairs:
        torch.testing.assert_close(frequencies, inverse_frequencies(spec.rope_dim, theta, ramp), rtol=1e-6, atol=0)
        assert scale == (ramp.attention_factor if ramp else 1.0)


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("make", [latent, compressed])
def test_transformers_reads_the_model_that_was_written(tmp_path, make, seed):
    spec = make(seed)
    assert replace(from_hf_config(to_hf_config(spec)), name="odd") == spec
    params = random_params(spec, seed)
    save(tmp_path, spec, params, torch.float32)
    tokens = torch.randint(spec.vocab_size, (TOKENS,), generator=torch.Generator().manual_seed(seed)).tolist()
    want, model = their_logits(tmp_path, tokens)
    check_frequencies(spec, model)
    found = generate(Model(spec, params, cache_layouts(spec, "fp32")), [tokens], max_new_tokens=1, keep_logits=True)
    torch.testing.assert_close(found.logits[0], want, rtol=0, atol=2e-4)


@pytest.mark.parametrize("rope, head", [(2, 98), (14, 98), (6, 22), (46, 94)])
def test_parts_of_a_head_come_out_whole(rope, head):
    """2 / 98 * 98 is below 2 in floating point, and transformers takes the integer below."""
    import transformers

    spec = compressed(0)
    index = replace(spec.index, head_dim=rope + 4, rope_start=4)
    spec = replace(spec, head_dim=head, rope_dim=rope, softmax_scale=head**-0.5, index=index)
    config = transformers.DeepseekV4Config.from_dict(to_hf_config(spec))
    assert config.qk_rope_head_dim == rope
    assert {int(head * part["partial_rotary_factor"]) for part in config.rope_parameters.values()} == {rope}


def test_an_untruncated_ramp_is_refused_where_transformers_does_not_look_for_it():
    config = to_hf_config(tiny_v4())
    config["rope_parameters"]["compress"]["truncate"] = False
    with pytest.raises(ValueError, match="config rope truncate: got False, allowed: True"):
        from_hf_config(config)
    yarn = replace(tiny_v32().yarn, truncate=False)
    assert to_hf_config(replace(tiny_v32(), yarn=yarn))["rope_parameters"]["truncate"] is False


def test_shared_index_layers_with_a_half_split_indexer_are_refused():
    spec = tiny_v32()
    with pytest.raises(ValueError, match="spec: got index_layers that share .* index.rope_interleaved False"):
        to_hf_config(replace(spec, index_layers=(True, False, True, False)))
    interleaved = replace(spec, index=replace(spec.index, rope_interleaved=True))
    assert (
        to_hf_config(interleaved)["model_type"] == "glm_moe_dsa" and to_hf_config(spec)["model_type"] == "deepseek_v32"
    )


@pytest.mark.parametrize("spec", [tiny_v32(), tiny_v4()], ids=["latent", "compressed"])
def test_every_field_is_in_the_config_or_refused(spec):
    """Each field, and each field of its parts, changed alone: what is written says so, or nothing is."""
    said = []
    for owner, part in (("", spec), ("index", spec.index), ("moe", spec.moe), ("yarn", spec.yarn)):
        for field in fields(part):
            value = getattr(part, field.name)
            other = not value if isinstance(value, bool) else value * 2 if isinstance(value, (int, float)) else None
            if other is None or field.name == "num_layers":
                continue
            try:
                changed = replace(part, **{field.name: other})
                whole = replace(spec, **{owner: changed}) if owner else changed
                config = to_hf_config(whole)
            except ValueError:
                continue
            assert replace(from_hf_config(config), name=spec.name) == whole
            said.append(field.name)
    assert {
        "hidden_size",
        "rms_eps",
        "rope_theta",
        "tie_embeddings",
        "attention_factor",
        "top_k",
        "routed_scale",
    } <= set(said)


def test_a_checkpoint_of_transformers_without_shared_experts(tmp_path):
    """Its shared experts are there, of no width."""
    spec = replace(
        tiny_v32(),
        moe=replace(tiny_v32().moe, num_shared=0),
        num_layers=2,
        moe_layers=(False, True),
        index_layers=(True,) * 2,
    )
    params = random_params(spec, seed=2)
    save(tmp_path / "ours", spec, params, torch.float32)
    import transformers

    transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours", dtype=torch.float32).save_pretrained(
        tmp_path / "theirs"
    )
    found, loaded = load(tmp_path / "theirs", dtype=torch.float32)
    assert replace(found, name=spec.name) == spec and loaded.keys() == params.keys()
    assert all(torch.equal(loaded[name], value) for name, value in params.items())


def test_one_shared_expert_in_v4_whatever_n_shared_experts_says():
    """As in transformers, whose V4 does not read it; weights of another width are refused by their shape."""
    config = to_hf_config(tiny_v4())
    for count in (0, 1, 2, None):
        assert from_hf_config(config | {"n_shared_experts": count}) == from_hf_config(config)


def test_lists_may_be_longer_than_the_layers_where_transformers_cuts_them():
    config = to_hf_config(tiny_v4())
    for key, more in (("layer_types", "sliding_attention"), ("mlp_layer_types", "moe")):
        assert from_hf_config(config | {key: [*config[key], more]}) == from_hf_config(config)
