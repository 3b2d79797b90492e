"""The generation loop as a function: batches, stopping, errors."""

from dataclasses import replace

import numpy
import pytest
import torch

from sparse_attn import Model, Sampling, generate
from sparse_attn.generation.batch import prepare
from sparse_attn.generation.steps import Decode, advance
from sparse_attn.generation.text import shipped_text
from sparse_attn.models.params import random_params
from sparse_attn.ops.layers.sampling import row_seeds, sample
from sparse_attn.pipeline import cache_layouts
from sparse_attn.spec import preset

TEXT = list(shipped_text().encode())
PROMPTS = [TEXT[:90], TEXT[200:207], TEXT[300:371]]


@pytest.fixture(scope="module", params=("tiny_v32", "tiny_glm5", "tiny_v4"))
def model(request):
    spec = preset(request.param)
    return Model(spec, random_params(spec, seed=1), cache_layouts(spec, "fp32"))


def test_a_batch_is_its_prompts(model):
    common = dict(max_new_tokens=7, keep_logits=True, block_size=128)
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


def test_noise_is_that_of_the_position_that_was_fed(model):
    """What prefill and decode drew is drawn again from the logits, each row's with the noise of its position."""
    sampling = Sampling(temperature=1.0, seed=7)
    found = generate(model, PROMPTS, max_new_tokens=8, prefill_tokens=50, sampling=sampling, keep_logits=True)
    for prompt, tokens, logits, seed in zip(PROMPTS, found.tokens, found.logits, row_seeds(7, 3).tolist()):
        drawn = sample(logits, torch.arange(len(logits)), temperature=1.0, seed=seed)
        assert drawn[len(prompt) - 1 :].tolist() == tokens


def test_copies_of_a_prompt_draw_apart_and_the_first_as_it_does_alone(model):
    sampling = Sampling(temperature=2.0, seed=7)
    alone = generate(model, [PROMPTS[1]], max_new_tokens=6, sampling=sampling).tokens[0]
    copies = generate(model, [PROMPTS[1]] * 8, max_new_tokens=6, sampling=sampling).tokens
    assert copies[0] == alone and len(set(map(tuple, copies))) == 8


def test_a_prompt_with_a_seed_draws_the_same_in_any_batch_and_place(model):
    """Chunks of prefill end within prompts, so that their first tokens are drawn in different steps."""
    common = dict(max_new_tokens=6, sampling=Sampling(temperature=2.0, seed=1))
    alone = generate(model, [PROMPTS[2]], **common | dict(sampling=Sampling(temperature=2.0, seed=-5))).tokens[0]
    for place, prompts in ((0, PROMPTS[::-1]), (2, PROMPTS), (1, [PROMPTS[0], PROMPTS[2]])):
        seeds = [None] * len(prompts)
        seeds[place] = -5
        found = generate(model, prompts, seeds=seeds, prefill_tokens=37, **common).tokens
        unseeded = generate(model, prompts, prefill_tokens=37, **common).tokens
        assert found[place] == alone != unseeded[place]
        assert found[:place] + found[place + 1 :] == unseeded[:place] + unseeded[place + 1 :]


@pytest.mark.parametrize(
    "lengths,prefill_tokens,rows", [([3] * 64, 2048, 3), ([90, 7, 71], 50, 50), ([90, 7, 71], 80, 80)]
)
def test_rings_are_as_long_as_the_prompts_need(lengths, prefill_tokens, rows):
    """The most rows of one request in one step, the window before them."""
    spec = preset("tiny_v4")
    model = Model(spec, random_params(spec, seed=1), cache_layouts(spec, "fp8"))
    reach = [length + 15 for length in lengths]
    batch = prepare(model, lengths, reach, block_size=None, prefill_tokens=prefill_tokens)
    assert {cache.shape[1] for cache in batch.caches.kv} == {spec.window - 1 + rows}


def test_rows_advance_until_they_stop():
    """Of six rows: one goes on, one is padding, one reaches the context's end, one goes beyond it, two draw a stop
    id."""
    state = Decode(
        tokens=torch.zeros(6, dtype=torch.int64), seq_lens=torch.tensor([3, 0, 9, 10, 5, 10], dtype=torch.int32),
        block_table=torch.zeros(6, 1, dtype=torch.int32), query_start_loc=torch.arange(7, dtype=torch.int32),
        stop_ids=torch.tensor([1, 3]),
    )  # fmt: skip
    drawn = torch.tensor([2, 2, 2, 2, 3, 1])
    advance(state, torch.nn.functional.one_hot(drawn, 4).float(), Sampling(), max_context=10)
    assert torch.equal(state.tokens, drawn) and state.seq_lens.tolist() == [4, 0, 10, 0, 0, 0]


def test_one_token_needs_no_decode_step(model):
    found = generate(model, [[5]], max_new_tokens=1, keep_logits=True)
    assert found.logits[0].shape == (1, model.spec.vocab_size)
    assert found.tokens == [[int(found.logits[0].argmax())]]


INTEGER, SEQUENCE = "allowed: an integer", "allowed: a sequence of integers"
ERRORS = {
    "prompts: got none, allowed: at least one": dict(prompts=[]),
    "prompts: got NoneType, allowed: a sequence of prompts": dict(prompts=None),
    "prompts: got str, allowed: a sequence of prompts": dict(prompts="text"),
    "prompts: got int64, allowed: a sequence of prompts": dict(prompts=numpy.int64(3)),
    f"prompts[0]: got int, {SEQUENCE}": dict(prompts=[1, 2]),
    f"prompts[0]: got str, {SEQUENCE}": dict(prompts=["text"]),
    "prompts[0]: got int64 [], allowed: one dimension of integers": dict(prompts=torch.tensor([1, 2])),
    "prompts[0]: got int64 [1, 2], allowed: one dimension of integers": dict(prompts=[torch.tensor([[1, 2]])]),
    "prompts[0]: got float32 [2], allowed: one dimension of integers": dict(prompts=[torch.ones(2)]),
    "prompts[0]: got bool [2], allowed: one dimension of integers": dict(prompts=[torch.ones(2).bool()]),
    "prompts[0]: got float64 [2], allowed: one dimension of integers": dict(prompts=[numpy.ones(2)]),
    "prompts[1]: got no token, allowed: at least one": dict(prompts=[[1], []]),
    "prompts[0]: got no token, allowed": dict(prompts=[torch.tensor([1])[:0]]),
    "prompts[1]: got id 999, allowed: 0 to 256": dict(prompts=[[1], [1, 999]]),
    "prompts[0]: got id -1, allowed: 0 to 256": dict(prompts=torch.tensor([[1, -1]])),
    "prompts[0]: got id -2, allowed: 0 to 256": dict(prompts=[[1, -2, 999, 2**32]]),
    "prompts[0]: got id 998, allowed: 0 to 256": dict(prompts=[[1, 998, -1]]),
    "prompts[0]: got id 4294967296, allowed: 0 to 256": dict(prompts=[[1, 2**32, -1]]),
    "prompts[0]: got id 4294967297, allowed: 0 to 256": dict(prompts=[[1, 2**32 + 1]]),
    "prompts[0]: got id 18446744073709551616, allowed: 0 to 256": dict(prompts=[[2**64, 1]]),
    f"prompts[0][1]: got 1.0, {INTEGER}": dict(prompts=[[1, 1.0]]),
    f"prompts[0][0]: got True, {INTEGER}": dict(prompts=[[True]]),
    f"prompts[0][0]: got tensor(1), {INTEGER}": dict(prompts=[[torch.tensor(1)]]),
    f"prompts[0][0]: got None, {INTEGER}": dict(prompts=[[None]]),
    "prompts[0]: got 8192 tokens to be followed by 2, allowed: 8193 in all": dict(
        prompts=[[1] * 8192], max_new_tokens=2
    ),
    "max_new_tokens: got 0, allowed: at least 1": dict(max_new_tokens=0),
    f"max_new_tokens: got 2.0, {INTEGER}": dict(max_new_tokens=2.0),
    f"max_new_tokens: got True, {INTEGER}": dict(max_new_tokens=True),
    "prefill_tokens: got 0, allowed: at least 1": dict(prefill_tokens=0),
    f"prefill_tokens: got None, {INTEGER}": dict(prefill_tokens=None),
    "block_size: got 0, allowed: at least 1": dict(block_size=0),
    "block_size: got -64, allowed: at least 1": dict(block_size=-64),
    f"block_size: got 64.0, {INTEGER}": dict(block_size=64.0),
    f"block_size: got True, {INTEGER}": dict(block_size=True),
    "sampling: got dict, allowed: a Sampling": dict(sampling=dict(temperature=1.0)),
    "temperature: got nan, allowed: 0 (greedy) or positive": dict(sampling=Sampling(float("nan"))),
    "temperature: got -1, allowed: 0 (greedy) or positive": dict(sampling=Sampling(-1)),
    "temperature: got '1', allowed: a number": dict(sampling=Sampling("1")),
    f"seed: got 0.5, {INTEGER}": dict(sampling=Sampling(1.0, 0.5)),
    "seed: got 9223372036854775808, allowed: a signed 64-bit": dict(sampling=Sampling(0.0, 2**63)),
    f"stop_ids[1]: got 1.5, {INTEGER}": dict(sampling=Sampling(stop_ids=(1, 1.5))),
    f"stop_ids[0]: got False, {INTEGER}": dict(sampling=Sampling(stop_ids=(False,))),
    f"stop_ids: got int, {SEQUENCE}": dict(sampling=Sampling(stop_ids=7)),
    "stop_ids: got id 257, allowed: 0 to 256": dict(sampling=Sampling(stop_ids=(257,))),
    "stop_ids: got id -1, allowed: 0 to 256": dict(sampling=Sampling(stop_ids=(-1,))),
    "seeds: got 2, allowed: 1, one a prompt": dict(seeds=[1, 2]),
    f"seeds: got int, {SEQUENCE}": dict(seeds=1),
    f"seeds[0]: got 1.0, {INTEGER}": dict(seeds=[1.0]),
    "seeds[0]: got -9223372036854775809, allowed: a signed 64-bit": dict(seeds=[-(2**63) - 1]),
}


@pytest.mark.parametrize("message", ERRORS)
def test_errors_name_the_argument_before_anything_runs(model, message, monkeypatch):
    monkeypatch.setattr(Model, "allocate_caches", lambda *_, **__: pytest.fail("caches were allocated"))
    with pytest.raises((ValueError, TypeError)) as error:
        generate(model, **dict(prompts=[[1]], max_new_tokens=1) | ERRORS[message])
    assert str(error.value).startswith(message)


def test_a_block_covers_whole_entries():
    spec = preset("tiny_v4")
    model = Model(spec, random_params(spec, seed=1), cache_layouts(spec, "fp32"))
    with pytest.raises(ValueError, match="^block_size: got 6, allowed: multiples of the compression ratio 4"):
        generate(model, [[1]], max_new_tokens=1, block_size=6)


def test_numbers_of_numpy_and_torch_are_taken(model):
    sampling = Sampling(1.5, 3, (7, 9))
    want = generate(model, [[1, 2, 3], [4, 5, 6]], max_new_tokens=5, sampling=sampling, seeds=[8, 9]).tokens
    taken = Sampling(numpy.float32(1.5), numpy.int64(3), torch.tensor([7, 9], dtype=torch.uint8))
    for prompts, seeds in (
        (torch.tensor([[1, 2, 3], [4, 5, 6]], dtype=torch.int32), torch.tensor([8, 9])),
        (numpy.arange(1, 7).reshape(2, 3), numpy.array([8, 9])),
        ((bytes([1, 2, 3]), [numpy.uint8(4), numpy.int16(5), 6]), (8, numpy.int32(9))),
    ):
        found = generate(model, prompts, max_new_tokens=numpy.int64(5), sampling=taken, seeds=seeds)
        assert found.tokens == want and all(type(token) is int for row in found.tokens for token in row)


def test_a_graph_needs_a_gpu(model):
    with pytest.raises(ValueError, match="graph: got device cpu, needs a CUDA or HIP device"):
        generate(model, PROMPTS, max_new_tokens=2, graph=True)


@pytest.mark.few(1)
@pytest.mark.kernel
@pytest.mark.parametrize("cache", ("fp8", "fp32"))
def test_kernels_generate_what_the_reference_does(device, cache):
    """Prefill in chunks and decode within the planned, locked workspace; selection drops two thirds of the keys."""
    spec = preset("tiny_glm5")
    spec = replace(
        spec, num_layers=2, moe_layers=(False, True), index_layers=(True, False), index=replace(spec.index, top_k=8)
    )
    layouts = cache_layouts(spec, cache)
    common = dict(max_new_tokens=3, prefill_tokens=13, block_size=4)
    host = generate(Model(spec, random_params(spec, 0), layouts, "reference"), [TEXT[:24], TEXT[50:53]], **common)
    found = generate(Model(spec, random_params(spec, 0, device), layouts, "triton"), [TEXT[:24], TEXT[50:53]], **common)
    assert found.tokens == host.tokens


@pytest.mark.gpu
@pytest.mark.parametrize("name", ("tiny_v32", "tiny_glm5", "tiny_v4"))
def test_gpu_generates_what_the_reference_does(name):
    spec = preset(name)
    layouts = cache_layouts(spec, "fp32")
    host = generate(Model(spec, random_params(spec, 0), layouts, "reference"), [TEXT[:700]], max_new_tokens=24)
    gpu = generate(
        Model(spec, random_params(spec, 0, "cuda"), layouts), [TEXT[:700]], max_new_tokens=24, prefill_tokens=300
    )
    assert gpu.tokens == host.tokens


@pytest.mark.gpu
@pytest.mark.parametrize("compile", (False, True))
@pytest.mark.parametrize("name", ("tiny_v32", "tiny_glm5", "tiny_v4"))
def test_captured_steps_generate_what_the_reference_does(name, compile):
    """A batch whose rows stop one by one, more steps than one piece of replays; logits come out of single replays."""
    torch.compiler.reset()
    spec = preset(name)
    layouts = cache_layouts(spec, "fp32")
    host = Model(spec, random_params(spec, 0), layouts, "reference")
    gpu = Model(spec, random_params(spec, 0, "cuda"), layouts)
    whole = generate(host, PROMPTS, max_new_tokens=80, keep_logits=True)
    stops = (whole.tokens[0][30], whole.tokens[2][71])
    for sampling in (Sampling(), Sampling(stop_ids=stops)):
        want = generate(host, PROMPTS, max_new_tokens=80, sampling=sampling).tokens
        found = generate(gpu, PROMPTS, max_new_tokens=80, sampling=sampling, compile=compile, graph=True)
        assert found.tokens == want
        assert found.graph_captures == 1
        steps = max(map(len, want)) - 1
        assert steps <= found.graph_replays <= min(steps + 63, 79)
    found = generate(gpu, PROMPTS, max_new_tokens=80, compile=compile, graph=True, keep_logits=True)
    assert found.tokens == whole.tokens and found.graph_replays == 79
    for got, want in zip(found.logits, whole.logits):
        torch.testing.assert_close(got, want, atol=1e-3, rtol=1e-3)


@pytest.mark.gpu
def test_what_cannot_be_captured_is_refused():
    spec = preset("tiny_v32")
    model = Model(spec, random_params(spec, 0, "cuda"), cache_layouts(spec, "fp32"), "reference")
    with pytest.raises(ValueError, match="graph: got impl 'reference'"):
        generate(model, PROMPTS, max_new_tokens=2, graph=True)
    found = generate(Model(spec, model.params, model.layouts), [[5]], max_new_tokens=1, graph=True)
    assert (found.graph_captures, found.graph_replays) == (0, 0)  # nothing to decode


@pytest.mark.gpu
@pytest.mark.parametrize("name", ("tiny_v32", "tiny_v4"))
def test_captured_and_compiled_draws_are_the_references(name):
    """Streams of places and a prompt's own seed, on a CPU, eager on the GPU, and captured."""
    torch.compiler.reset()
    spec = preset(name)
    host, gpu = (Model(spec, random_params(spec, 0, device), cache_layouts(spec, "fp32")) for device in ("cpu", "cuda"))
    common = dict(max_new_tokens=12, sampling=Sampling(temperature=1.5, seed=2), seeds=[None, None, 77, None])
    want = generate(host, [PROMPTS[1]] * 4, **common).tokens
    assert len(set(map(tuple, want))) == 4
    for ways in ({}, dict(graph=True), dict(graph=True, compile=True)):
        assert generate(gpu, [PROMPTS[1]] * 4, **common, **ways).tokens == want, ways


@pytest.mark.parametrize("head_dim, rope_dim", [(52, 16), (52, 2), (50, 14)])
def test_rings_of_any_length_take_any_head(head_dim, rope_dim):
    """prefill_tokens make rings an odd or an even number of records long, which are 68, 54 or 64 bytes."""
    spec = replace(
        preset("tiny_v4"),
        head_dim=head_dim,
        rope_dim=rope_dim,
        num_layers=1,
        layer_kinds=("indexed",),
        hash_layers=(False,),
    )
    model = Model(spec, random_params(spec, 0, "cpu"), cache_layouts(spec, "fp8"), "reference")
    tokens = {
        str(generate(model, [list(range(20)), [5, 7]], max_new_tokens=2, prefill_tokens=count).tokens)
        for count in (8, 9, 10, 11)
    }
    assert len(tokens) == 1
