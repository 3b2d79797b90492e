"""The layer of multi-token prediction: drafts of a decode loop are those of its definition, and change no token."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from conftest import long
from support.rank_threads import over_threads
from support.speculation import SAMPLINGS, last_ones, perfect, predicting_model
from support.steps import small

from sparse_attn import Model, Sampling, generate
from sparse_attn.checkpoints.load import load
from sparse_attn.checkpoints.sharding import shard_params
from sparse_attn.cli.documents import held_out_text
from sparse_attn.cli.main import main
from sparse_attn.cli.shipped import folder_of
from sparse_attn.framework.target import H200
from sparse_attn.generation import batch as batch_module
from sparse_attn.generation.batch import prepare
from sparse_attn.generation.loop import EagerDecode, LoopSettings
from sparse_attn.generation.model import Predictor
from sparse_attn.generation.sampling import draw
from sparse_attn.generation.steps import decode_plan, prefill_step, seeds_of, slot_block
from sparse_attn.generation.text import shipped_text
from sparse_attn.mesh import ONE_RANK, Mesh
from sparse_attn.models.mtp import PREFIX
from sparse_attn.models.params import random_params
from sparse_attn.models.shapes import prediction_spec
from sparse_attn.pipeline import Bounds, cache_layouts, workspace_size
from sparse_attn.spec import deepseek_v32

TEXT = list(shipped_text().encode())
PROMPTS = [TEXT[:50], TEXT[200:203], TEXT[300:341]]
MODELS = ("tiny_v32", "tiny_glm5", "tiny_v4")
NEW = 13


def loop_of(model, prompts, drafts, sampling, new, **options):
    """A loop behind the prefill of ``prompts``, and what it was prepared with."""
    reach = [len(prompt) + new for prompt in prompts]
    batch = prepare(model, list(map(len, prompts)), reach, block_size=16, prefill_tokens=37, next_n=drafts + 1)
    predictor = Predictor(model)
    for spans in batch.chunks:
        prefill_step(
            model, prompts, spans, batch.tables, batch.caches, batch.state, sampling, batch.max_context,
            predict=predictor,
        )  # fmt: skip
    state = batch.state
    loop = EagerDecode(
        model, batch.caches, LoopSettings(
            batch.max_context, state.block_table.shape[1], (len(prompts),), sampling=sampling, speculate=drafts,
            **options,
        ),
    )  # fmt: skip
    loop.load(state.tokens, state.seq_lens, state.block_table, state.ring_table, seeds_of(state, sampling))
    return loop


@torch.no_grad()
def defined_drafts(model, tokens, drafts, sampling, seed):
    """What the layer drafts behind ``tokens``, the last of which was drawn and is not fed yet, from nothing but them."""
    batch = prepare(model, [len(tokens) - 1], [len(tokens) + drafts], block_size=16, prefill_tokens=1000)
    predictor, found = Predictor(model), []

    def predict(following, hidden, caches, plan):
        following[len(tokens) - 2] = tokens[-1]
        found.append(predictor(following, hidden, caches, plan))

    prefill_step(
        model, [tokens[:-1]], batch.chunks[0], batch.tables, batch.caches, batch.state, sampling, batch.max_context,
        predict=predict,
    )  # fmt: skip
    hidden, made, at = found[0][len(tokens) - 2 : len(tokens) - 1], [], len(tokens) - 1
    seeds = torch.tensor([seed])
    for place in range(drafts):
        made.append(draw(predictor.logits(hidden), torch.tensor([at + place]), sampling, seeds))
        state = batch.state._replace(seq_lens=torch.tensor([at + place + 1], dtype=torch.int32))
        plan = decode_plan(state, slot_block(batch.caches, model.mesh), batch.max_context, model.impl)
        hidden = predictor(made[-1], hidden, batch.caches, plan)
    return torch.cat(made).tolist()


@pytest.mark.few(2)
@pytest.mark.parametrize("sampling", (Sampling(), Sampling(temperature=1.5, seed=3)))
@pytest.mark.parametrize("drafts", (1, 3))
@pytest.mark.parametrize("name", MODELS)
def test_drafts_are_those_of_the_definition(name, drafts, sampling):
    """Of a vocabulary of 3 tokens, of which many are accepted, so that every number of rejected rows lies in caches."""
    model = predicting_model(name, vocab_size=3)
    prompts = [[token % 3 for token in prompt] for prompt in PROMPTS]
    loop = loop_of(model, prompts, drafts, sampling, 40)
    seeds, known = loop.state.seeds.tolist(), [p + [t] for p, t in zip(prompts, loop.state.tokens.tolist())]
    counts = set()
    for _ in range(6):
        tokens = loop.run(1).wait()[0]
        for row, own in enumerate(tokens.tolist()):
            own = [token for token in own if token >= 0]
            counts.add(len(own))
            known[row] += own
            expected = defined_drafts(model, known[row], drafts, sampling, seeds[row])
            assert loop._speculator._held.drafts[row].tolist() == expected
    assert counts >= {1, 2}


@pytest.mark.few(1)
@pytest.mark.parametrize("drafts", (1, 2, 3))
@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_those_without_drafts(name, sampling, drafts):
    model, prompts = predicting_model(name, vocab_size=7), [[token % 7 for token in prompt] for prompt in PROMPTS]
    options = dict(max_new_tokens=30, sampling=SAMPLINGS[sampling], prefill_tokens=37)
    expected = generate(model, prompts, **options)
    found = generate(model, prompts, speculate=drafts, **options)
    assert found.tokens == expected.tokens
    assert expected.accepted_per_step is None and 1 < found.accepted_per_step < drafts + 1


@pytest.mark.few(1)
@pytest.mark.parametrize("name", MODELS)
def test_bits_of_a_batch_invariant_model_are_those_without_drafts(name):
    """In bf16, of fp8 caches, whose codes any difference would move."""
    spec = replace(small(name, 3), vocab_size=7, eos_token_ids=())
    params = random_params(spec, seed=1, dtype=torch.bfloat16, mtp=True)
    model = Model(spec, params, cache_layouts(spec, "fp8"), batch_invariant=True)
    prompts = [[token % 7 for token in prompt] for prompt in PROMPTS]
    options = dict(max_new_tokens=12, keep_logits=True, sampling=Sampling(temperature=1.0, seed=3))
    expected = generate(model, prompts, **options)
    for drafter in (None, perfect(prompts, expected.tokens, 2)):
        found = generate(model, prompts, speculate=2, drafter=drafter, **options)
        assert found.tokens == expected.tokens
        assert all(torch.equal(mine, own) for mine, own in zip(found.logits, expected.logits))
    assert found.accepted_per_step > 2


@pytest.mark.parametrize("new", (2, 3, 4, 6))
def test_drafts_beyond_what_is_left_are_not_computed(new, monkeypatch):
    """Of the layer, rows of a step and then a row for each draft behind the first: none where no step is left, or one
    that draws the last token without drafts."""
    model, (prompt, *_) = predicting_model("tiny_v32", vocab_size=7), [[token % 7 for token in TEXT[:9]]]
    expected, steps, drafts, fed = generate(model, [prompt], max_new_tokens=new), [], 8, []
    whole, predict = EagerDecode._decode, Predictor.forward

    def step(loop, rows):
        steps.append([])
        whole(loop, rows)
        fed.append(loop._speculator._held.drafts[0].ge(0).sum().item())

    def predicted(self, tokens, *args, **kwargs):
        if steps:
            steps[-1].append(len(tokens))
        return predict(self, tokens, *args, **kwargs)

    monkeypatch.setattr(EagerDecode, "_decode", step)
    monkeypatch.setattr(Predictor, "forward", predicted)
    found = generate(model, [prompt], max_new_tokens=new, speculate=drafts)
    assert found.tokens == expected.tokens and steps
    width, left = max(1, new - 3) + 1, new - 1  # at most so many rows a step, so many tokens are left
    for calls, count in zip(steps, fed):
        room = max(0, min(left - 2, width - 1))
        assert count == room and calls == [width, *[1] * (room - 1)][: room and None], (steps, fed)
        left -= 1
        if count:
            break  # what is accepted behind it depends on the model
    assert not steps[-1] and not fed[-1]


@pytest.mark.few(0)
@pytest.mark.parametrize("name", MODELS)
def test_compiled(monkeypatch, name):
    """The model: prefill and steps; the layer: prefill, rows of a step, and a row a request."""
    torch.compiler.reset()
    model, counts, whole = predicting_model(name, vocab_size=7), [], torch.compile

    def counted(graph, inputs, **options):
        counts.append(graph)
        return graph

    monkeypatch.setattr(torch, "compile", lambda run, options, **kinds: whole(run, backend=counted, **kinds))
    made = []
    for prompts in (PROMPTS, [TEXT[9:29], TEXT[:2], TEXT[400:470]]):
        prompts = [[token % 7 for token in prompt] for prompt in prompts]
        expected = generate(model, prompts, max_new_tokens=NEW)
        found = generate(model, prompts, max_new_tokens=NEW, speculate=2, compile=True)
        assert found.tokens == expected.tokens
        made.append(len(counts))
    assert made[0] == made[1] <= 6
    torch.compiler.reset()


@pytest.mark.few(1)
@pytest.mark.parametrize("dimension", ("context", "tensor"))
@pytest.mark.parametrize("name", ("tiny_v32", "tiny_v4"))
def test_over_ranks(name, dimension):
    """Two ranks of keys, or of heads, experts and vocabulary, draft and draw what one process does."""
    spec = replace(small(name, 3), vocab_size=7, eos_token_ids=())
    params, prompts = random_params(spec, seed=1, mtp=True), [[token % 7 for token in prompt] for prompt in PROMPTS]

    def generated(mesh):
        model = Model(spec, shard_params(dict(params), mesh), cache_layouts(spec, "fp32"), "reference", mesh=mesh)
        return generate(model, prompts, max_new_tokens=10, speculate=2, prefill_tokens=37, block_size=16)

    want = generated(ONE_RANK)
    for found in over_threads(2, lambda ranks: generated(Mesh(**{dimension: ranks}))):
        assert (found.tokens, found.accepted_per_step) == (want.tokens, want.accepted_per_step)


def test_scratch_is_enough_for_rows_of_one(monkeypatch):
    """3 requests of V3.2's dims: their 12 rows are split less than the 3 rows that a later draft takes."""
    spec = replace(deepseek_v32(), num_layers=1, moe_layers=(False,), index_layers=(True,))
    model = SimpleNamespace(
        spec=spec, layouts=cache_layouts(spec, "fp8"), predicts=True, impl="triton", device=torch.device("cuda"),
        params={},
    )  # fmt: skip
    monkeypatch.setattr(batch_module, "resolve_impl", lambda impl, device: impl)
    monkeypatch.setattr(batch_module, "target_of", lambda device: H200)
    bounds = Bounds(max_batch=3, max_batched_tokens=0, max_model_len=4096, next_n=4, block_size=64, kv_rows=0)
    alone = workspace_size(prediction_spec(spec), replace(bounds, next_n=1), H200, model.layouts)
    assert alone.nbytes > workspace_size(spec, bounds, H200, model.layouts).nbytes
    assert batch_module.scratch_size(model, bounds).nbytes >= alone.nbytes


def test_other_weights_are_the_same_without_it():
    spec = small("tiny_v4", 2)
    alone, both = (random_params(spec, seed=1, mtp=mtp) for mtp in (False, True))
    assert {name for name in both if not name.startswith(PREFIX)} == set(alone)
    assert all(torch.equal(alone[name], both[name]) for name in alone)


def test_the_command_line_says_how_many_are_accepted(tmp_path):
    found = []
    for drafts in (0, 2):
        out = tmp_path / f"{drafts}.json"
        given = ["--preset", "tiny-v32", "--prompt-ids", "5,6,7", "--max-new-tokens", "6", "--device", "cpu"]
        assert main(["generate", *given, "--speculate", str(drafts), "--json", str(out)]) == 0
        found.append(json.loads(out.read_text()))
    assert found[0]["tokens"] == found[1]["tokens"]
    assert "drafter" not in found[0] and found[1]["drafter"] == "mtp" and 1 <= found[1]["accepted_per_step"] <= 3
    given = ["generate", "--preset", "tiny-v32", "--speculate", "1", "--plot", str(tmp_path / "x.png")]
    assert main([*given, "--prompt-ids", "5"]) == 2


def test_a_model_without_the_layer_is_refused():
    spec = small("tiny_v32", 2)
    model = Model(spec, random_params(spec, seed=1), cache_layouts(spec, "fp32"))
    with pytest.raises(ValueError, match="drafter: got None and a model without multi-token"):
        generate(model, [[1, 2, 3]], max_new_tokens=4, speculate=2)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_captured(name):
    """Replays draft, verify and advance. Weights in fp32: other row counts round alike enough for these tokens."""
    model = predicting_model(name, 7, device="cuda", batch_invariant=True)
    prompts = [[token % 7 for token in prompt] for prompt in PROMPTS]
    for sampling in SAMPLINGS.values():
        options = dict(max_new_tokens=30, sampling=sampling, prefill_tokens=37, logprobs=0)
        expected = generate(model, prompts, graph=True, **options)
        for drafts, drafter in ((1, None), (3, None), (2, last_ones)):
            own = dict(speculate=drafts, drafter=drafter)
            found, eager = (generate(model, prompts, graph=graph, **own, **options) for graph in (True, False))
            assert found.tokens == expected.tokens == eager.tokens
            assert found.accepted_per_step == eager.accepted_per_step >= 1
            assert found.graph_replays <= expected.graph_replays  # a row may accept nothing


def equal_share(one, other):
    """Of the tokens of two generations."""
    return [mine == own for a, b in zip(one.tokens, other.tokens, strict=True) for mine, own in zip(a, b, strict=True)]


@pytest.mark.gpu
@pytest.mark.parametrize("name", ("reader-v32", "reader-v4"))
def test_captured_readers(name, record_property):
    """The tokens of a batch-invariant model are those without drafts. Otherwise other row counts may round to other
    tokens, and the share of equal ones is recorded."""
    folder, ids = folder_of(name), list(held_out_text().encode())
    prompts = [ids[start : start + 160] for start in range(900, 30000, 29100 // 8)]
    for dtype, cache, invariant in (
        (torch.float32, "fp32", True), (torch.bfloat16, "fp8", True), (torch.bfloat16, "fp8", False),
    ):  # fmt: skip
        spec, params = load(folder, device="cuda", dtype=dtype, mtp=True)
        model = Model(spec, params, cache_layouts(spec, cache), batch_invariant=invariant)
        for temperature in (0.0, 1.0):
            sampling = Sampling(temperature=temperature, seed=4)
            options = dict(max_new_tokens=33, sampling=sampling, graph=True, logprobs=0)
            expected, found = (generate(model, prompts, speculate=drafts, **options) for drafts in (0, 2))
            equal = equal_share(expected, found)
            case = f"{str(dtype).removeprefix('torch.')}, invariant {invariant}, temperature {temperature}"
            drawn = ([one.drawn for one in each.logprobs] for each in (expected, found))
            moved = max(float((mine - own).abs().max()) for mine, own in zip(*drawn))
            told = f"{sum(equal)} of {len(equal)} equal, {found.accepted_per_step:.2f} a step, moved {moved:.1e}"
            record_property(case, told)
            print(f"{name}: {case}: {told}")
            assert found.accepted_per_step >= 1.8
            assert all(equal) or not invariant


@pytest.mark.few(1)
@pytest.mark.parametrize("drafts,least", ((2, 1.8), (1, 1.5), (3, 1.8)))
@pytest.mark.parametrize("temperature", (0.0, 1.0))
@pytest.mark.parametrize("name", ("reader-v32", "reader-v4"))
def test_readers_accept_their_drafts(name, temperature, drafts, least):
    """Behind held-out text, of drafts + 1 tokens that a step may give. A third draft takes nothing from two."""
    folder, ids = folder_of(name), list(held_out_text().encode())
    spec, params = load(folder, dtype=torch.float32, mtp=True)
    model = Model(spec, params, cache_layouts(spec, "fp8"))
    prompts = [ids[start : start + 160] for start in range(900, 30000, 29100 // (8 if long() else 3))]
    options = dict(max_new_tokens=49 if long() else 25, sampling=Sampling(temperature=temperature, seed=4))
    expected = generate(model, prompts, **options)
    found = generate(model, prompts, speculate=drafts, **options)
    assert found.tokens == expected.tokens and found.accepted_per_step >= least
