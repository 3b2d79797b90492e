"""What indexers selected in one forward, replayed in another."""

import copy

import pytest
import torch
from support.bridged import models, padded_batch
from support.parity import stable_topk

import sparse_attn.integrations.transformers as bridge

NAMES = ["deepseek_v32", "glm_moe_dsa", "mistral_large4", "hy_v4", "deepseek_v4"]


@pytest.fixture(autouse=True, scope="module")
def registered():
    bridge.register()
    yield
    bridge.unregister()


@pytest.fixture(autouse=True)
def stable(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "topk", stable_topk)


def drifted(name):
    """(the model of a rollout, a trainer's whose indexers would select others)"""
    rollout = models(name)[1]
    trainer = copy.deepcopy(rollout)
    torch.manual_seed(1)
    for key, parameter in trainer.named_parameters():
        if "indexer" in key:
            parameter.data.normal_()
    return rollout, trainer


def values(model, ids):
    output = model(ids, use_cache=False)
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


def recorded_of(model, ids):
    with torch.no_grad(), bridge.record_indices(model) as indices:
        values(model, ids)
    return indices


@pytest.mark.parametrize("name", NAMES)
def test_a_trainer_attends_to_what_the_rollout_selected(name):
    rollout, trainer = drifted(name)
    ids = padded_batch()[0]
    with torch.no_grad():
        with bridge.record_indices(rollout) as indices:
            want = values(rollout, ids)
        other = values(trainer, ids)
        with bridge.replay_indices(trainer, indices):
            got = values(trainer, ids)
        assert torch.equal(values(trainer, ids), other)  # behind the block as before
    assert torch.equal(got, want) and not torch.allclose(other, want, rtol=1e-3, atol=1e-3)
    assert all(one.dtype == torch.int32 and one.shape[:2] == ids.shape for one in indices.values())


@pytest.mark.parametrize("name", ["deepseek_v32", "glm_moe_dsa", "deepseek_v4"])
def test_rows_of_a_rollout_follow_each_other(name):
    """A prefill and decode steps, replayed as one sequence: the log-probabilities of its tokens are the same."""
    rollout, trainer = drifted(name)
    ids = padded_batch()[0][:, :20]
    with torch.no_grad():
        with bridge.record_indices(rollout) as indices:
            made = rollout.generate(
                ids, max_new_tokens=6, do_sample=False, output_scores=True, return_dict_in_generate=True,
                attention_mask=torch.ones_like(ids),
            )  # fmt: skip
        with bridge.replay_indices(trainer, indices):
            logits = values(trainer, made.sequences[:, :-1])[:, 19:]
    torch.testing.assert_close(logits, torch.stack(made.scores, 1), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_of_what_is_replayed(checkpointing):
    rollout, trainer = drifted("deepseek_v32")
    ids, indices = padded_batch()[0], recorded_of(rollout, padded_batch()[0])
    found = []
    for model in (rollout, trainer):
        model = copy.deepcopy(model).requires_grad_().train()
        if checkpointing:
            model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
        with bridge.replay_indices(model, indices):
            values(model, ids).square().mean().backward()
        found.append({key: one.grad for key, one in model.named_parameters() if one.grad is not None})
    assert found[0].keys() == found[1].keys() and all(torch.equal(found[0][key], found[1][key]) for key in found[0])


@pytest.mark.parametrize("change, message", [
    (lambda one: one.index_fill(2, torch.tensor([0]), 44), r"^indices\[1\]: got \[44, .* in row 0 of sequence 0, allowed"),
    (lambda one: one.flip(2), r"^indices\[1\]: got .* in row \d+ of sequence 0"),
    (lambda one: torch.where(one == one.amax(), -2, one), r"^indices\[1\]: got "),
    (lambda one: one[:, 1:], r"^indices\[1\]: got shape \[3, 44, 16\], allowed: \[3, 45, k\]"),
])  # fmt: skip
def test_what_no_row_could_have_selected_is_refused(change, message):
    model, ids = models("deepseek_v32")[1], padded_batch()[0]
    indices = recorded_of(model, ids)
    indices[1] = change(indices[1])
    with torch.no_grad(), bridge.replay_indices(model, indices), pytest.raises(ValueError, match=message):
        values(model, ids)


def test_what_is_asked_for_wrongly_says_so():
    model, ids = models("deepseek_v32")[1], padded_batch()[0]
    indices = recorded_of(model, ids)
    with pytest.raises(ValueError, match="^indices: got none of layer 1, allowed"):
        bridge.replay_indices(model, {0: indices[0]}).__enter__()
    with pytest.raises(ValueError, match="^indices: got those of layer 7, allowed: those of layers 0, 1"):
        bridge.replay_indices(model, indices | {7: indices[0]}).__enter__()
    with pytest.raises(TypeError, match=r"^indices\[0\]: got dtype torch.int64, allowed: int32"):
        bridge.replay_indices(model, {layer: one.long() for layer, one in indices.items()}).__enter__()
    with pytest.raises(ValueError, match="^model: got a Linear without indexers"):
        bridge.record_indices(torch.nn.Linear(1, 1)).__enter__()
    with bridge.record_indices(model):
        with pytest.raises(ValueError, match="^model: got one that is recorded or replayed already"):
            bridge.replay_indices(model, indices).__enter__()
        with pytest.raises(ValueError, match="^record_indices: got a call in grad mode"):
            values(model, ids)
    values(model, ids)
