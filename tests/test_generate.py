"""The generation loop as a function: batches, stopping, errors."""

from dataclasses import replace

import pytest
import torch

from sparse_attn.models.params import random_params
from sparse_attn.pipeline import cache_layouts
from sparse_attn.runtime.generate import Model, Sampling, generate
from sparse_attn.runtime.text import shipped_text
from sparse_attn.spec import preset

TEXT = list(shipped_text().encode())
PROMPTS = [TEXT[:90], TEXT[200:207], TEXT[300:371]]


@pytest.fixture(scope="module", params=("tiny_v32", "tiny_glm5"))
def model(request):
    spec = preset(request.param)
    return Model(spec, random_params(spec, seed=1), cache_layouts(spec, "fp32"))


def test_a_batch_is_its_prompts(model):
    common = dict(max_new_tokens=7, keep_logits=True, block_size=16)
    together = generate(model, PROMPTS, prefill_tokens=50, **common)
    for number, prompt in enumerate(PROMPTS):
        alone = generate(model, [prompt], **common)
        assert together.tokens[number] == alone.tokens[0]
        assert together.logits[number].shape == (len(prompt) + 6, model.spec.vocab_size)
        torch.testing.assert_close(together.logits[number], alone.logits[0], atol=1e-4, rtol=0)


def test_rows_stop_one_by_one(model):
    whole = generate(model, PROMPTS, max_new_tokens=8).tokens
    stops = (whole[0][2], whole[2][4])
    found = generate(model, PROMPTS, max_new_tokens=8, sampling=Sampling(stop_ids=stops), keep_logits=True)
    for prompt, row, stopped, logits in zip(PROMPTS, whole, found.tokens, found.logits):
        ends = [place for place, token in enumerate(row) if token in stops]
        assert stopped == (row[: ends[0] + 1] if ends else row)
        assert logits.shape[0] == len(prompt) + len(stopped) - 1


def test_one_token_needs_no_decode_step(model):
    found = generate(model, [[5]], max_new_tokens=1, keep_logits=True)
    assert found.logits[0].shape == (1, model.spec.vocab_size)
    assert found.tokens == [[int(found.logits[0].argmax())]]


@pytest.mark.parametrize(
    "prompts, count, message",
    [
        ([], 1, "prompts: got none"),
        ([[1], []], 1, r"prompts\[1\]: got no token"),
        ([[1], [1, 999]], 1, r"prompts\[1\]: got id 999, allowed: 0 to 256"),
        ([[1]], 0, "max_new_tokens: got 0"),
        ([[1] * 8192], 2, r"prompts\[0\]: got 8192 tokens to be followed by 2, allowed: 8193 in all"),
    ],
)
def test_errors(model, prompts, count, message):
    with pytest.raises(ValueError, match=message):
        generate(model, prompts, max_new_tokens=count)


@pytest.mark.kernel
@pytest.mark.parametrize("cache", ("fp8", "fp32"))
def test_kernels_generate_what_the_reference_does(device, cache):
    """Prefill in chunks and decode within the planned, locked workspace; selection drops two thirds of the keys."""
    spec = preset("tiny_glm5")
    spec = replace(spec, num_layers=2, moe_layers=(False, True), index_layers=(True, False), index=replace(spec.index, top_k=8))
    layouts = cache_layouts(spec, cache)
    common = dict(max_new_tokens=3, prefill_tokens=13, block_size=4)
    host = generate(Model(spec, random_params(spec, 0), layouts, "reference"), [TEXT[:24], TEXT[50:53]], **common)
    found = generate(Model(spec, random_params(spec, 0, device), layouts, "triton"), [TEXT[:24], TEXT[50:53]], **common)
    assert found.tokens == host.tokens


@pytest.mark.gpu
@pytest.mark.parametrize("name", ("tiny_v32", "tiny_glm5"))
def test_gpu_generates_what_the_reference_does(name):
    spec = preset(name)
    layouts = cache_layouts(spec, "fp32")
    host = generate(Model(spec, random_params(spec, 0), layouts, "reference"), [TEXT[:700]], max_new_tokens=24)
    gpu = generate(Model(spec, random_params(spec, 0, "cuda"), layouts), [TEXT[:700]], max_new_tokens=24, prefill_tokens=300)
    assert gpu.tokens == host.tokens
