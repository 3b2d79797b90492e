"""Small random models of transformers, each twice: by its own eager attention, and by the bridge."""

import contextlib
import copy
import functools
import importlib

import pytest
import torch
from support.parity import GLM, V32, stable_topk

PLAIN_ROPE = dict(rope_parameters=dict(rope_type="default", rope_theta=1e4))
V4 = dict(
    vocab_size=61, hidden_size=48, moe_intermediate_size=24, num_hidden_layers=4, num_attention_heads=4, head_dim=32,
    q_lora_rank=24, num_experts_per_tok=2, n_routed_experts=6, sliding_window=12, o_groups=2, o_lora_rank=16,
    index_n_heads=3, index_head_dim=16, index_topk=5, max_position_embeddings=512, partial_rotary_factor=0.25,
    layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
                 "compressed_sparse_attention"],
    mlp_layer_types=["moe"] * 4, compress_rates=dict(compressed_sparse_attention=4, heavily_compressed_attention=12),
    bos_token_id=1, eos_token_id=None, pad_token_id=0,
)  # fmt: skip
TWO_LAYERS = dict(num_hidden_layers=2, bos_token_id=1, eos_token_id=None, pad_token_id=0)
# name: (module of transformers, prefix of its config, class of the model, keys)
MODELS = {
    "deepseek_v32": ("deepseek_v32", "DeepseekV32", "DeepseekV32ForCausalLM", V32 | TWO_LAYERS),
    "glm_moe_dsa": (
        "glm_moe_dsa", "GlmMoeDsa", "GlmMoeDsaForCausalLM", GLM | TWO_LAYERS | dict(num_hidden_layers=3),
    ),
    "axk2": ("axk2", "AXK2", "AXK2ForCausalLM", V32 | TWO_LAYERS | PLAIN_ROPE | dict(gated_norm_rank=4)),
    "hy_v4": ("hy_v4", "HYV4", "HYV4ForCausalLM", V32 | TWO_LAYERS | PLAIN_ROPE),
    "hy_v4_vl": (
        "hy_v4_vl", "HYV4VLText", "HYV4VLTextModel",
        V32 | TWO_LAYERS | dict(rope_parameters=PLAIN_ROPE["rope_parameters"] | dict(mrope_section=[4, 2, 2])),
    ),
    "mistral_large4": (
        "mistral_large4", "MistralLarge4Text", "MistralLarge4TextModel",
        V32 | TWO_LAYERS | PLAIN_ROPE | dict(num_hidden_layers=4, no_rope_layers=[1, 0, 1, 0], kv_source_layers=[0, 1, 0, 1]),
    ),
    "deepseek_v4": ("deepseek_v4", "DeepseekV4", "DeepseekV4ForCausalLM", V4),
}  # fmt: skip
TOP_K = 16
SMALL_VISION = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, patch_size=4)
VISION = {
    "mistral_large4": dict(vision_config=SMALL_VISION | dict(model_type="pixtral", image_size=16), image_token_index=1),
    "hy_v4_vl": dict(
        vision_config=SMALL_VISION | dict(max_image_size=16, out_hidden_size=64), image_token_id=1, video_token_id=1
    ),
}  # a model with a vision tower around the text model
TEXT_AND_VISION = {"text_config": "sparse_attn", "vision_config": "eager"}


@functools.cache
def models(name):
    """(eager, bridged): one model twice, with the same weights, both of them not to be trained."""
    module, prefix, model_class, keys = MODELS[name]
    modeling = importlib.import_module(f"transformers.models.{module}")
    config_class, model_class = getattr(modeling, f"{prefix}Config"), getattr(modeling, model_class)
    torch.manual_seed(len(name))
    eager = model_class(config_class(**keys, initializer_range=0.15)).eval().requires_grad_(False)
    for parameter in eager.parameters():
        if parameter.dim() == 1:
            parameter += 0.2 * torch.randn(parameter.shape)
    bridged = model_class(config_class(**keys, initializer_range=0.15)).eval().requires_grad_(False)
    bridged.load_state_dict(eager.state_dict())
    eager.set_attn_implementation("eager")
    bridged.set_attn_implementation("sparse_attn")
    return eager, bridged


@functools.cache
def generating(name):
    """``models`` that generate. Those of text models with a vision tower, which sees no image here."""
    if name not in VISION:
        return models(name)
    module, prefix, _, keys = MODELS[name]
    modeling, prefix = importlib.import_module(f"transformers.models.{module}"), prefix.removesuffix("Text")
    text = getattr(modeling, f"{prefix}TextConfig")(**keys | dict(vocab_size=61), initializer_range=0.15)
    config = getattr(modeling, f"{prefix}Config")(text_config=text.to_dict(), **VISION[name])
    torch.manual_seed(len(name))
    eager = getattr(modeling, f"{prefix}ForConditionalGeneration")(config).eval().requires_grad_(False)
    bridged = copy.deepcopy(eager)
    eager.set_attn_implementation("eager")
    bridged.set_attn_implementation(TEXT_AND_VISION)
    return eager, bridged


@contextlib.contextmanager
def stable():
    """transformers with a top-k that takes the lowest index among equal scores, as this library does."""
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(torch.Tensor, "topk", stable_topk)
        yield


def padded_batch(rows=45, padding=(0, 20, 36), left=True):
    """(token ids, mask, positions) of a batch whose rows are padded by so much, the last one to fewer tokens than the
    top-k."""
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(2, 61, (len(padding), rows), generator=generator)
    at = torch.arange(rows)
    mask = torch.stack([(at >= pad) if left else (at < rows - pad) for pad in padding]).long()
    return ids, mask, (mask.cumsum(-1) - 1).clamp(min=0)
