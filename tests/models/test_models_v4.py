"""Parity of DeepSeek-V4's forward with transformers 5.17, and with itself over every way to split the work.

transformers' indexer gets a stable top-k, lowest index first: relu makes exact ties. Where a sink is +inf, transformers
gets a sink so large that its softmax is the same but finite.
"""

import functools
import math

import pytest
import torch
from support.parity import difference, saved_and_continued
from support.requests import Requests

from sparse_attn.checkpoints.load import load
from sparse_attn.pipeline import cache_layouts

TOLERANCE = 2e-4
PROMPTS = (300, 131, 23)
DECODE_STEPS = 160

V4 = dict(
    vocab_size=67, hidden_size=48, moe_intermediate_size=24, num_hidden_layers=4, num_attention_heads=4, head_dim=32,
    q_lora_rank=24, num_experts_per_tok=2, n_routed_experts=6, sliding_window=24, o_groups=2, o_lora_rank=16,
    index_n_heads=3, index_head_dim=16, index_topk=9, max_position_embeddings=512, partial_rotary_factor=0.25,
    layer_types=["sliding_attention", "compressed_sparse_attention", "heavily_compressed_attention",
                 "compressed_sparse_attention"],
    mlp_layer_types=["hash_moe", "moe", "hash_moe", "moe"],
    rope_scaling=dict(rope_type="yarn", factor=16.0, original_max_position_embeddings=64, beta_fast=32, beta_slow=1),
)  # fmt: skip
CONFIGS = {
    "all kinds": V4,
    "other ratios, no yarn, tied, two streams": V4
    | dict(
        layer_types=["heavily_compressed_attention", "compressed_sparse_attention", "sliding_attention"],
        mlp_layer_types=["moe", "moe", "hash_moe"], num_hidden_layers=3, rope_scaling=None, tie_word_embeddings=True,
        compress_rates=dict(compressed_sparse_attention=8, heavily_compressed_attention=64), hc_mult=2,
        hc_sinkhorn_iters=3, sliding_window=7, index_topk=3, num_attention_heads=6, o_groups=3, swiglu_limit=0.3,
    ),
    "infinite sinks": V4
    | dict(
        num_hidden_layers=2, layer_types=["heavily_compressed_attention", "compressed_sparse_attention"],
        mlp_layer_types=["moe", "moe"],
    ),
}  # fmt: skip


@functools.cache
def theirs(name):
    """(model folder, tokens and logits of each prompt followed by greedy decode steps), all from transformers."""
    import transformers

    keys = {key: value for key, value in CONFIGS[name].items() if value is not None}
    torch.manual_seed(len(name))
    config = transformers.DeepseekV4Config(**keys, initializer_range=0.2)
    model = transformers.DeepseekV4ForCausalLM(config).eval()
    for key, value in (*model.named_parameters(), *model.named_buffers()):
        if key.endswith("tid2eid"):
            value.data = torch.stack([torch.randperm(keys["n_routed_experts"])[: value.shape[1]] for _ in value])
        elif not key.endswith("inv_freq") and (value.dim() == 1 or key.endswith("position_bias")):
            value.data += (0.2 if "norm" in key else 0.5) * torch.randn(value.shape)
    if name == "infinite sinks":
        for layer in model.model.layers:
            layer.self_attn.sinks.data[:2] = torch.tensor([1e30, -math.inf])
    return saved_and_continued(model, PROMPTS, DECODE_STEPS)


@functools.cache
def ours(name):
    spec, params = load(theirs(name)[0], dtype=torch.float32)
    for key, value in params.items():
        if key.endswith("attn.sink"):
            value[value > 1e29] = math.inf
    return spec, params


def requests_of(name, kind="fp32", count=None, **options):
    spec, params = ours(name)
    count = len(PROMPTS) if count is None else count
    return Requests(spec, params, cache_layouts(spec, kind), count, max(PROMPTS) + DECODE_STEPS + 2, **options)


def prefill(name, cuts, **options):
    """Prefill the first prompt with steps that end at ``cuts`` and at its end. Returns the requests and the logits."""
    requests, rows = requests_of(name, **options), []
    tokens = theirs(name)[1][0][0]
    for start, stop in zip((0, *cuts), (*cuts, PROMPTS[0])):
        rows += requests.step(prefill=[(0, tokens[start:stop])])
    return requests, torch.cat(rows)


@pytest.mark.parametrize("name", CONFIGS)
def test_parity_with_transformers(name):
    """All prompts at once, then all requests token by token."""
    results = theirs(name)[1]
    requests = requests_of(name)
    logits = [[rows] for rows in requests.step(prefill=[(r, results[r][0][:n]) for r, n in enumerate(PROMPTS)])]
    for step in range(DECODE_STEPS):
        part = [(r, results[r][0][length + step : length + step + 1]) for r, length in enumerate(PROMPTS)]
        for (r, _), rows in zip(part, requests.step(decode=part)):
            logits[r].append(rows)
    assert difference(results, logits) < TOLERANCE


def test_every_part_matters():
    """The parity would be hollow if the top-k kept everything, or nothing were ever compressed or out of the window."""
    spec, _ = ours("all kinds")
    assert max(PROMPTS) // spec.indexed_ratio > 4 * spec.index.top_k
    assert max(PROMPTS) > 2 * spec.full_ratio and min(PROMPTS) < spec.window < max(PROMPTS)


@pytest.mark.parametrize("cuts", [(124,), (125,), (126,), (127,), (128,), (129,), (1, 2, 3, 255, 256, 257), (130, 131)])
def test_chunk_borders(cuts):
    """Every residue modulo the small ratio, and around multiples of the large one."""
    want = theirs("all kinds")[1][0][1][: PROMPTS[0]]
    assert (prefill("all kinds", cuts)[1] - want).abs().max() < TOLERANCE


@pytest.mark.parametrize("chunk", [3, 37])
def test_small_chunks_in_small_rings(chunk):
    """Rings as short as the chunk allows: each key is overwritten as soon as no row can see it."""
    want = theirs("all kinds")[1][0][1][: PROMPTS[0]]
    cuts = tuple(range(chunk, PROMPTS[0], chunk))
    assert (prefill("all kinds", cuts, step_rows=chunk)[1] - want).abs().max() < TOLERANCE


@pytest.fixture
def in_place(monkeypatch):
    """From now on prefill rows attend in place."""
    from sparse_attn.models import deepseek_v4

    forward = functools.partial(deepseek_v4.forward, prefill_in_place=True)
    return lambda: monkeypatch.setattr(deepseek_v4, "forward", forward)


def test_prefill_in_place_equals_gathered(in_place):
    gathered = prefill("all kinds", (129,))[1]
    in_place()
    torch.testing.assert_close(prefill("all kinds", (129,))[1], gathered, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", ["gathered", "in place"])
def test_mixed_steps(form, in_place):
    """While the first request decodes, the second prefills in chunks beside it, with padded rows behind."""
    if form == "in place":
        in_place()
    results = theirs("all kinds")[1]
    requests, logits = requests_of("all kinds"), [[], []]
    logits[0] += requests.step(prefill=[(0, results[0][0][: PROMPTS[0]])], padding=2)
    for step in range(12):
        at = PROMPTS[0] + step
        first, second = requests.step(
            decode=[(0, results[0][0][at : at + 1])],
            prefill=[(1, results[1][0][11 * step : 11 * step + 11])],
            padding=3,
        )
        logits[0].append(first)
        logits[1].append(second)
    for r in (0, 1):
        got = torch.cat(logits[r])
        assert (results[r][1][: len(got)] - got).abs().max() < TOLERANCE


@pytest.mark.parametrize("next_n", [2, 3, 4])
def test_rejected_tokens(next_n):
    """Each step feeds next_n tokens, of which some are wrong and rejected; the next step starts where they did."""
    results = theirs("all kinds")[1]
    requests = requests_of("all kinds", next_n=next_n, step_rows=PROMPTS[0] + next_n)
    requests.step(prefill=[(r, results[r][0][:length]) for r, length in enumerate(PROMPTS)])
    generator = torch.Generator().manual_seed(next_n)
    for step in range(40):
        part, accepted = [], []
        for r in range(len(PROMPTS)):
            at = requests.lengths[r]
            tokens = results[r][0][at : at + next_n].clone()
            keep = int(torch.randint(1, next_n + 1, (), generator=generator))
            tokens[keep:] = (tokens[keep:] + 1) % V4["vocab_size"]
            part.append((r, tokens))
            accepted.append(keep)
        for (r, _), keep, got in zip(part, accepted, requests.step(decode=part)):
            at = requests.lengths[r] - next_n
            assert (results[r][1][at : at + keep] - got[:keep]).abs().max() < TOLERANCE, (step, r)
            requests.lengths[r] = at + keep


def test_padded_decode_requests_change_nothing():
    results = theirs("all kinds")[1]
    alone, padded = requests_of("all kinds"), requests_of("all kinds")
    for requests in (alone, padded):
        requests.step(prefill=[(0, results[0][0][: PROMPTS[0] - 1])])
    before = [[None if c is None else c.clone() for c in layers] for layers in padded.caches]
    token = results[0][0][PROMPTS[0] - 1 : PROMPTS[0]]
    want = alone.step(decode=[(0, token)])[0]
    padded.lengths[1] = -1  # step makes it 0: a padded request
    padded.block_table[1] = padded.rings[1] = 2**31 - 1
    got = padded.step(decode=[(0, token), (1, token)])[0]
    torch.testing.assert_close(want, got, rtol=1e-5, atol=1e-5)
    spec = ours("all kinds")[0]
    changed = [
        sum(
            0 if c is None else int((a.view(torch.int32) != c.view(torch.int32)).any(-1).sum())
            for a, c in zip(old, new)
        )
        for old, new in zip(before, padded.caches)
    ]
    indexed = spec.layer_kinds.count("indexed")
    assert changed == [4, indexed, indexed, 3, indexed]  # rows: every ring, and the entries that position 299 completes
