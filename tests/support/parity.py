"""DeepSeek-V3.2 and GLM-5 by transformers, and the same weights by our forward.

relu makes exact ties at the top-k threshold, among which torch.topk picks arbitrarily; here transformers gets a stable
top-k, lowest index first.
"""

import functools
import tempfile
from collections import namedtuple

import pytest
import torch
from support.requests import Requests

from sparse_attn.checkpoints.load import load
from sparse_attn.pipeline import cache_layouts

TOLERANCE = 2e-4
DECODE_STEPS = 32
PROMPTS = (45, 23, 9)
TopK = namedtuple("TopK", "values indices")

V32 = dict(
    vocab_size=61, hidden_size=64, intermediate_size=96, moe_intermediate_size=32, num_hidden_layers=3,
    num_attention_heads=4, num_key_value_heads=4, n_routed_experts=8, kv_lora_rank=32, q_lora_rank=48,
    qk_rope_head_dim=16, v_head_dim=24, qk_nope_head_dim=20, n_group=4, topk_group=2, num_experts_per_tok=3,
    max_position_embeddings=256, index_topk=16, index_head_dim=32, index_n_heads=4, first_k_dense_replace=1,
    rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64, mscale=1.0,
                         mscale_all_dim=1.0, beta_fast=32, beta_slow=1),
)  # fmt: skip
GLM = V32 | dict(
    num_hidden_layers=5, num_attention_heads=3, num_key_value_heads=3, n_group=1, topk_group=1, num_experts_per_tok=2,
    qk_nope_head_dim=24, v_head_dim=32, index_n_heads=2, rms_norm_eps=1e-5, index_topk_freq=2, index_skip_topk_offset=2,
    rope_parameters=dict(rope_type="default", rope_theta=1e6),
)  # fmt: skip
CONFIGS = {
    "v32": ("v32", V32),
    "v32 odd heads, all routed, tied, no renormalisation": (
        "v32",
        V32
        | dict(
            num_attention_heads=5, num_key_value_heads=5, index_n_heads=3, index_head_dim=16, index_topk=11, n_group=2,
            topk_group=1, first_k_dense_replace=0, num_hidden_layers=2, tie_word_embeddings=True, norm_topk_prob=False,
            rope_parameters=dict(rope_type="default", rope_theta=5e3),
        ),
    ),
    "glm shared": ("glm", GLM),
    "glm pattern, two shared experts, yarn on cos and sin": (
        "glm",
        GLM
        | dict(
            num_hidden_layers=4, index_topk_pattern="FSFS", n_shared_experts=2, index_topk=5,
            mlp_layer_types=["sparse", "dense", "sparse", "dense"],
            rope_parameters=dict(rope_type="yarn", rope_theta=1e4, factor=4.0, original_max_position_embeddings=64),
        ),
    ),
}  # fmt: skip


def stable_topk(scores, k, dim=-1, largest=True, sorted=True):
    values, indices = torch.sort(scores + 0.0, dim=dim, descending=largest, stable=True)
    return TopK(values.narrow(dim, 0, k), indices.narrow(dim, 0, k))


def saved_and_continued(model, lengths, steps):
    """(folder of the saved transformers model, tokens and logits of random prompts of these lengths and ``steps`` greedy
    decode steps)."""
    folder = tempfile.mkdtemp()
    model.save_pretrained(folder)
    results = []
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(torch.Tensor, "topk", stable_topk)
        for length in lengths:
            prompt = torch.randint(model.config.vocab_size, (1, length))
            output = model(prompt, use_cache=True)
            tokens, logits = [prompt], [output.logits]
            for _ in range(steps):
                tokens.append(logits[-1][:, -1:].argmax(-1))
                output = model(tokens[-1], past_key_values=output.past_key_values, use_cache=True)
                logits.append(output.logits)
            results.append((torch.cat(tokens, 1)[0], torch.cat(logits, 1)[0]))
    return folder, results


@functools.cache
def theirs(name):
    """(model folder, prompts, tokens and logits of each prompt followed by greedy decode steps), all from
    transformers."""
    import transformers

    kind, keys = CONFIGS[name]
    config_class, model_class = {
        "v32": (transformers.DeepseekV32Config, transformers.DeepseekV32ForCausalLM),
        "glm": (transformers.GlmMoeDsaConfig, transformers.GlmMoeDsaForCausalLM),
    }[kind]
    torch.manual_seed(len(name))
    model = model_class(config_class(**keys, initializer_range=0.15, attn_implementation="eager")).eval()
    for parameter in (*model.parameters(), *model.buffers()):
        is_rope = parameter.shape[0] == keys["qk_rope_head_dim"] // 2
        if parameter.dim() == 1 and parameter.is_floating_point() and not is_rope:
            parameter.data += 0.2 * torch.randn(parameter.shape)
    return saved_and_continued(model, PROMPTS, DECODE_STEPS)


@functools.cache
def ours(name):
    return load(theirs(name)[0], dtype=torch.float32)


def requests_of(name, kind="fp32", **options):
    spec, params = ours(name)
    return Requests(spec, params, cache_layouts(spec, kind), len(PROMPTS), max(PROMPTS) + DECODE_STEPS + 2, **options)


def difference(results, logits):
    """Largest distance between their logits and ours, over all requests and positions."""
    return max((want - torch.cat(got)).abs().max().item() for (_, want), got in zip(results, logits))


def run(name, chunk, **options):
    """Prefill all requests, ``chunk`` tokens of each a step (None: at once), then decode them together."""
    results = theirs(name)[1]
    requests, logits = requests_of(name, **options), [[] for _ in PROMPTS]
    while any(requests.lengths[r] < length for r, length in enumerate(PROMPTS)):
        part = [
            (r, results[r][0][requests.lengths[r] : min(length, requests.lengths[r] + (chunk or length))])
            for r, length in enumerate(PROMPTS)
            if requests.lengths[r] < length
        ]
        for (r, _), rows in zip(part, requests.step(prefill=part)):
            logits[r].append(rows)
    for step in range(DECODE_STEPS):
        part = [(r, results[r][0][length + step : length + step + 1]) for r, length in enumerate(PROMPTS)]
        for (r, _), rows in zip(part, requests.step(decode=part)):
            logits[r].append(rows)
    return logits
