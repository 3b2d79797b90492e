"""Parity of the functional forward with transformers 5.17, and with itself over every way to split the work."""

from dataclasses import replace

import pytest
import torch
from support.parity import CONFIGS, PROMPTS, TOLERANCE, difference, ours, requests_of, run, theirs
from support.requests import Requests

from sparse_attn import Model
from sparse_attn.models.moe import experts_dense, experts_grouped, moe, route
from sparse_attn.models.norms import rms_norm, unit_rms
from sparse_attn.models.params import random_params
from sparse_attn.models.shapes import param_shapes
from sparse_attn.ops.ragged.step_plans import build_step_plan
from sparse_attn.pipeline import cache_layouts
from sparse_attn.pipeline.options import Options
from sparse_attn.spec import tiny_glm5, tiny_v4, tiny_v32


@pytest.mark.parametrize("chunk", [None, 16])
@pytest.mark.parametrize("name", CONFIGS)
def test_parity_with_transformers(name, chunk):
    assert difference(theirs(name)[1], run(name, chunk)) < TOLERANCE


def test_selection_matters():
    """The parity above would be hollow if the top-k kept everything."""
    spec, _ = ours("v32")
    assert max(PROMPTS) > 2 * spec.index.top_k


@pytest.mark.parametrize("name", ["v32", "glm shared"])
def test_mixed_steps(name):
    """While the first request decodes, the second prefills in chunks beside it, with padded rows behind."""
    results = theirs(name)[1]
    requests, logits = requests_of(name), [[], []]
    logits[0] += requests.step(prefill=[(0, results[0][0][: PROMPTS[0]])], padding=2)
    for step in range(6):
        at = PROMPTS[0] + step
        first, second = requests.step(
            decode=[(0, results[0][0][at : at + 1])], prefill=[(1, results[1][0][9 * step : 9 * step + 9])], padding=3
        )
        logits[0].append(first)
        logits[1].append(second)
    for r in (0, 1):
        got = torch.cat(logits[r])
        assert (results[r][1][: len(got)] - got).abs().max() < TOLERANCE


@pytest.mark.parametrize("name", ["v32", "glm shared"])
def test_two_tokens_per_decode_step(name):
    """next_n 2: both rows of a request see their own number of keys."""
    results = theirs(name)[1]
    requests = requests_of(name)
    requests.step(prefill=[(r, results[r][0][:length]) for r, length in enumerate(PROMPTS)])
    for step in range(0, 6, 2):
        part = [(r, results[r][0][length + step : length + step + 2]) for r, length in enumerate(PROMPTS)]
        for (r, _), got in zip(part, requests.step(decode=part)):
            want = results[r][1][PROMPTS[r] + step : PROMPTS[r] + step + 2]
            assert (want - got).abs().max() < TOLERANCE


def test_padded_decode_requests_change_nothing():
    results = theirs("v32")[1]
    alone, padded = requests_of("v32"), requests_of("v32")
    for requests in (alone, padded):
        requests.step(prefill=[(0, results[0][0][: PROMPTS[0]])])
    before = [cache.clone() for cache in padded.caches.kv]
    token = results[0][0][PROMPTS[0] : PROMPTS[0] + 1]
    want = alone.step(decode=[(0, token)])[0]
    padded.lengths[1] = -1  # step makes it 0: a padded request
    padded.block_table[1] = 2**31 - 1
    got = padded.step(decode=[(0, token), (1, token)])[0]
    torch.testing.assert_close(want, got, rtol=1e-5, atol=1e-5)
    changed = sum((a.view(torch.int32) != b.view(torch.int32)).any(-1).sum() for a, b in zip(before, padded.caches.kv))
    assert changed == len(before)  # one row per layer


@pytest.mark.parametrize(
    "make, change, error, message",
    [
        (tiny_v32, dict(tokens=torch.zeros(2)), TypeError, "tokens: got dtype torch.float32, allowed: torch.int64, torch.int32"),
        (tiny_v32, dict(tokens=torch.zeros(3).long()), ValueError, r"tokens: got shape \[3\], allowed: \[2\], a row per row of the"),
        (tiny_v32, dict(tokens=torch.zeros(1, 2).long()), ValueError, r"tokens: got shape \[1, 2\]"),
        (tiny_v32, dict(kv=lambda kv: kv[:-1]), ValueError, r"caches.kv: got \d+ entries, allowed: num_layers = \d+"),
        (tiny_v32, dict(index=lambda index: (None, *index[1:])), ValueError,
         r"caches.index\[0\]: got None, allowed: a tensor, the layer has such a cache"),
        (tiny_glm5, dict(index=lambda index: (index[0],) * len(index)), ValueError,
         r"caches.index\[\d\]: got a tensor, allowed: None, the layer has no such cache"),
        (tiny_v4, dict(state=lambda state: (None,) * len(state)), ValueError, r"caches.state\[\d\]: got None"),
        (tiny_v4, dict(ring_table=None), ValueError, r"plan.ring_table: got None, allowed: int32 \[requests, ring blocks\]"),
    ],
)  # fmt: skip
def test_what_a_forward_refuses(make, change, error, message):
    model = Model(spec := make(), random_params(spec, seed=0), cache_layouts(spec, "fp32"))
    caches = model.allocate_caches(1, 256, requests=1, step_rows=2)
    loc, table = torch.tensor([0, 2], dtype=torch.int32), torch.zeros(1, 1, dtype=torch.int32)
    plan = build_step_plan(loc, loc[1:], table, torch.arange(2), kv_capacity=2, max_context=256)
    if model.has_rings:
        plan = plan._replace(ring_table=change.get("ring_table", table))
    for name in caches._fields:
        if name in change:
            caches = caches._replace(**{name: change[name](getattr(caches, name))})
    with pytest.raises(error, match="^" + message):
        model(change.get("tokens", torch.zeros(2).long()), caches, plan)


def test_blocks_hold_whole_entries():
    model = Model(spec := tiny_v4(), {"embed": torch.empty(0)}, cache_layouts(spec, "fp32"))
    with pytest.raises(ValueError, match="^block_size: got 64, allowed: multiples of the compression ratio 128"):
        model.allocate_caches(1, 64, requests=1, step_rows=2)


def test_norms_of_nothing():
    for x in (torch.zeros(2, 8), torch.zeros(2, 8).bfloat16()):
        assert torch.equal(unit_rms(x, 1e-6), x) and torch.equal(rms_norm(x, torch.ones(8, dtype=x.dtype), 1e-6), x)


def test_no_shared_experts():
    spec = tiny_v32()
    alone = replace(spec, moe=replace(spec.moe, num_shared=0))
    shared = {name for name in param_shapes(spec) if "moe.shared" in name}
    assert shared and param_shapes(spec).keys() - param_shapes(alone).keys() == shared
    params, x = (
        random_params(alone, seed=0),
        torch.randn(5, spec.hidden_size, generator=torch.Generator().manual_seed(0)),
    )
    layer = f"layers.{spec.moe_layers.index(True)}.moe."
    weights, ids = route(x, params, layer, alone.moe, None, Options("reference"))
    want = experts_dense(x, weights, ids, params[layer + "gate_up"], params[layer + "down"])
    assert torch.equal(moe(x, params, layer, alone.moe, options=Options("reference")), want)


def test_gate_logits_are_not_rounded():
    """A bf16 model is routed as the same values in fp32 are."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(50, 48, generator=generator).bfloat16()
    params = {"gate": torch.randn(8, 48, generator=generator), "bias": torch.randn(8, generator=generator)}
    spec = tiny_v32().moe
    spec = replace(spec, num_experts=8, experts_per_token=3, num_groups=4, top_groups=2)
    got = route(x, params, "", spec, None, Options("reference"))
    want = route(x.float(), params, "", spec, None, Options("reference"))
    assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_grouped_experts_equal_dense_ones():
    generator = torch.Generator().manual_seed(3)
    x, gate_up, down = (torch.randn(shape, generator=generator) for shape in ((37, 32), (5, 48, 32), (5, 32, 24)))
    ids = torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(37)]).int()
    ids[ids == 3] = 4  # an expert without tokens; duplicates count twice
    weights = torch.rand(37, 2, generator=generator)
    for clamp in (None, 0.3):
        arguments = x, weights, ids, gate_up, down, clamp
        torch.testing.assert_close(experts_grouped(*arguments), experts_dense(*arguments), rtol=1e-5, atol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_grouped_experts_on_gpu(tokens):
    """bf16, captured: the same answer as the dense form in fp32, for ids that change between replays."""
    experts, top_k, hidden, inner = 32, 4, 256, 128
    generator = torch.Generator().manual_seed(3)

    def draw():
        ids = torch.stack([torch.randperm(experts, generator=generator)[:top_k] for _ in range(tokens)]).int()
        return ids.cuda(), torch.rand(tokens, top_k, generator=generator).cuda()

    x, gate_up, down = (
        (torch.randn(shape, generator=generator) * 0.1).cuda().bfloat16()
        for shape in ((tokens, hidden), (experts, 2 * inner, hidden), (experts, hidden, inner))
    )
    ids, weights = draw()
    experts_grouped(x, weights, ids, gate_up, down)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = experts_grouped(x, weights, ids, gate_up, down)
    for _ in range(3):
        new_ids, new_weights = draw()
        ids.copy_(new_ids), weights.copy_(new_weights)
        graph.replay()
        want = experts_dense(x.float(), weights, ids, gate_up.float(), down.float())
        torch.testing.assert_close(got.float(), want, rtol=2e-2, atol=2e-2 * want.abs().max().item())


@pytest.mark.gpu
@pytest.mark.parametrize("make", [tiny_v32, tiny_glm5])
def test_gpu_equals_cpu(make):
    spec = make()
    tokens = torch.randint(256, (200,), generator=torch.Generator().manual_seed(2))
    logits = []
    for device in ("cpu", "cuda"):
        requests = Requests(spec, random_params(spec, 1, device), cache_layouts(spec, "fp32"), 2, 256)
        rows = requests.step(prefill=[(0, tokens[:190]), (1, tokens[:70])])
        for at in range(190, 200):
            rows += requests.step(decode=[(0, tokens[at : at + 1]), (1, tokens[at - 120 : at - 119])])
        logits.append(torch.cat(rows).cpu())
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("make", [tiny_v32, tiny_glm5])
def test_hadamard_changes_no_score_but_by_rounding(make):
    spec = make()
    params = random_params(spec, seed=1)
    tokens = torch.randint(256, (90,), generator=torch.Generator().manual_seed(2))
    logits = []
    for flag in (False, True):
        rotated = replace(spec, index=replace(spec.index, hadamard=flag))
        requests = Requests(rotated, params, cache_layouts(rotated, "fp32"), 1, 96)
        logits += requests.step(prefill=[(0, tokens)])
    torch.testing.assert_close(logits[0], logits[1], rtol=1e-4, atol=1e-4)
