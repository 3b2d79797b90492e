"""The training forward gives the logits of the functional one; what trains the shipped models runs end to end."""

from dataclasses import replace

import pytest
import torch
from support.requests import Requests

from sparse_attn.models.params import random_params
from sparse_attn.pipeline import cache_layouts
from sparse_attn.spec import CompressedSpec, preset

LENGTH = 300
TOLERANCE = 1e-3


def trained(spec, params, tokens, **options):
    from training import latent, windowed

    forward = windowed.forward if isinstance(spec, CompressedSpec) else latent.forward
    with torch.no_grad():
        return forward(params, spec, tokens, stable=True, **options).logits


@pytest.mark.parametrize("top_k", [LENGTH, 16])
@pytest.mark.parametrize("name", ["tiny_v32", "tiny_glm5", "tiny_v4"])
def test_parity_with_the_functional_forward(name, top_k):
    """Dense where top-k keeps everything; a batch of two against two requests, one prefilled in chunks."""
    spec = preset(name)
    spec = replace(spec, index=replace(spec.index, top_k=top_k))
    params = random_params(spec, seed=2)
    tokens = torch.randint(256, (2, LENGTH), generator=torch.Generator().manual_seed(1))
    requests = Requests(spec, params, cache_layouts(spec, "fp32"), 2, LENGTH)
    first, second = requests.step(prefill=[(0, tokens[0]), (1, tokens[1][:130])])
    rest = requests.step(prefill=[(1, tokens[1][130:])])
    want = torch.stack([first, torch.cat([second, *rest])])
    got = trained(spec, params, tokens, sparse=top_k < LENGTH)
    assert (got - want).abs().max() < TOLERANCE
    if top_k < LENGTH:
        assert (trained(spec, params, tokens, sparse=False) - want).abs().max() > 10 * TOLERANCE


@pytest.mark.parametrize("name", ["tiny_v32", "tiny_v4"])
def test_parity_of_multi_token_prediction(name):
    """Of the layer behind the model, prefilled in one step."""
    from training import latent, predicting, windowed
    from training.parts import Trace

    spec = preset(name)
    params = random_params(spec, seed=2, mtp=True)
    tokens = torch.randint(256, (1, LENGTH), generator=torch.Generator().manual_seed(1))
    requests = Requests(spec, params, cache_layouts(spec, "fp32"), 1, LENGTH)
    layer, plans = requests.model.predictor(), []
    whole, following = requests.model.forward, tokens[0].roll(-1)

    def kept(ids, caches, plan):
        logits, hidden = whole(ids, caches, plan, keep_hidden=True)
        plans.append(layer(following, hidden, caches, plan))
        return logits

    requests.model.forward = kept
    requests.step(prefill=[(0, tokens[0])])
    forward = windowed.forward if isinstance(spec, CompressedSpec) else latent.forward
    with torch.no_grad():
        hidden = forward(params, spec, tokens, sparse=True, stable=True).hidden
        got = predicting.predict(
            params, spec, following.unsqueeze(0), hidden, None, Trace([], {}), sparse=True, stable=True
        )
        logits = predicting.predicted_logits(params, spec, got, 1)[0]
    assert (got.view_as(plans[0]) - plans[0]).abs().max() < TOLERANCE
    assert (logits - layer.logits(plans[0])).abs().max() < TOLERANCE


def small(model):
    from training.recipe import MODELS

    spec = MODELS[model](8)
    return replace(spec, hidden_size=32, q_lora=32, moe=replace(spec.moe, intermediate_size=16))


def trainer(model, stages, start=None, **options):
    import numpy as np
    from training.batches import Source
    from training.loop import Settings, Trainer
    from training.text import Corpus

    from sparse_attn.cli.documents import held_out_text

    ids = np.frombuffer(held_out_text().encode(), np.uint8).astype(np.int16)
    settings = Settings(model, stages, 256, 1e-3, 0.5, 1.0, 16, 0.05, 1e-3, 0)._replace(**options)
    source = Source(Corpus(ids, ids), torch.device("cpu"), settings.seed)
    return Trainer(small(model), settings, source, bf16=False, graph=False, fuse=False, start=start)


@pytest.mark.parametrize("model", ["v32", "v4"])
def test_each_stage_moves_what_it_should(model):
    from training.recipe import Stage, is_index

    run = trainer(model, [Stage(kind, 256, 2) for kind in ("dense", "warmup", "sparse")], tokens=512)
    changed = []
    for _ in run.settings.stages:
        before = {name: run.weights[name].detach().clone() for name in run.names}
        run.step(), run.step()
        changed.append({name for name in run.names if not torch.equal(before[name], run.weights[name])})
    index = {name for name in run.names if is_index(name)}
    assert index and changed == [set(run.names) - index, index, set(run.names)]
    found = run.report()
    assert all(value > 0 for key, value in found.items() if key != "answers_right")


@pytest.mark.parametrize("model", ["v32", "v4"])
def test_indexers_and_model_do_not_pull_at_each_other(model):
    """The indexers' loss gives no gradient to the rest, and the selection none to them."""
    from training.recipe import is_index

    run = trainer(model, [])
    weights = {n: v.clone().requires_grad_(v.is_floating_point() and n in run.names) for n, v in run.weights.items()}
    out = run.forward(weights, run.spec, torch.randint(256, (2, 96)), sparse=True, index_rows=torch.arange(96))
    index = [name for name in run.names if is_index(name)]
    others = [name for name in run.names if not is_index(name)]
    by_loss = torch.autograd.grad(
        sum(out.trace.index_loss), [weights[n] for n in index + others], retain_graph=True, allow_unused=True
    )
    assert [gradient is not None for gradient in by_loss] == [True] * len(index) + [False] * len(others)
    by_logits = torch.autograd.grad(out.logits.square().sum(), [weights[n] for n in index + others], allow_unused=True)
    assert [gradient is not None for gradient in by_logits] == [False] * len(index) + [True] * len(others)


def test_indexers_learn_the_attention():
    from training.recipe import Stage

    run = trainer("v32", [Stage("warmup", 64, 40)], learning_rate=1e-2)
    losses = []
    for _ in range(4):
        for _ in range(10):
            run.step()
        losses.append(run.report()["index_loss"])
    assert losses[-1] < 0.75 * losses[0]


@pytest.mark.few(0)
def test_a_resumed_run_ends_where_an_uninterrupted_one_does(tmp_path):
    from training.loop import finish, train
    from training.recipe import Stage

    from sparse_attn.checkpoints.load import load

    stages = [Stage("dense", 64, 3), Stage("sparse", 128, 3)]
    whole = trainer("v4", stages)
    assert train(whole, tmp_path, deadline=float("inf"), report_every=2)
    parts = trainer("v4", stages)
    for _ in range(2):
        parts.step()
    state = parts.state()
    rest = trainer("v4", stages)
    rest.resume(state)
    assert train(rest, tmp_path, deadline=float("inf"), report_every=2)
    for name, value in whole.weights.items():
        torch.testing.assert_close(rest.weights[name], value, rtol=0, atol=0, msg=name)
    assert not train(trainer("v4", stages), tmp_path, deadline=0.0, report_every=2)
    with pytest.raises(ValueError, match="other settings"):
        trainer("v4", stages, seed=1).resume(state)
    finish(whole, tmp_path, {})
    spec, params = load(tmp_path)
    assert replace(spec, name=whole.spec.name) == whole.spec
    for name, value in whole.rounded().items():
        assert torch.equal(params[name], value), name


def test_marks_of_a_batch():
    """Every answer repeats what was said of its key before; nothing that cannot be known counts."""
    run = trainer("v32", [])
    batch = run.source.batch(8, 600, 1.0)
    asked = 0
    for tokens, text, answer in zip(*batch):
        line, known = bytes(tokens.tolist()).decode(), {}
        for place in (place for place, sign in enumerate(line) if sign == "[" and line[place + 5 : place + 6] == "="):
            key, value = line[place + 1 : place + 5], line[place + 6 : place + 10]
            marked = answer[place + 5 : place + 9]  # of the predictions of the value
            assert marked.sum() in (0, 4) and not text[place - 1 : place + 4].any()
            if marked.any():
                asked += 1
                assert known[key] == value
            assert not text[place + 5 : place + 9].any()
            known[key] = value
        assert ((text + answer) <= 1).all()
    assert asked > 20


def test_held_out_text_is_what_it_claims(monkeypatch):
    from training import text

    from sparse_attn.cli.documents import held_out_text

    known = text._shingles(held_out_text())
    kept = text._without("Alone here, nothing of it is known to anybody else.\n\n" + held_out_text()[:2000], known)
    assert kept.startswith("Alone") and not text._shingles(kept) & known


def test_starts_from_a_checkpoint(tmp_path):
    from sparse_attn.checkpoints.load import load
    from sparse_attn.checkpoints.save import save

    spec = small("v32")
    params = random_params(spec, seed=4)
    save(tmp_path, spec, params, torch.float32)
    start = load(tmp_path, dtype=torch.float32)[1]
    begun = trainer("v32", [("sparse", 64, 1)], start=start)
    assert all(torch.equal(begun.weights[name], params[name]) for name in begun.names)
