"""Models of transformers that train under the bridge, beside their own eager attention, and what indexers selected in
one forward, replayed in another."""

import copy

import pytest
import torch
from support.bridged import MODELS, models, padded_batch
from support.parity import stable_topk

pytest.importorskip("transformers", minversion="5.24")

import sparse_attn.integrations.transformers as bridge  # noqa: E402

REPLAYED = ["deepseek_v32", "glm_moe_dsa", "mistral_large4", "hy_v4", "deepseek_v4"]
# Its gradient is what is left of sums that cancel.
CANCELLED = "hc_head.hc_scale"


@pytest.fixture(autouse=True, scope="module")
def registered():
    bridge.register()
    yield
    bridge.unregister()


@pytest.fixture(autouse=True)
def stable(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "topk", stable_topk)


def trained(name):
    return [copy.deepcopy(model).requires_grad_().train() for model in models(name)]


def values(model, ids, **options):
    output = model(ids, use_cache=False, **options)
    return output.logits if hasattr(output, "logits") else output.last_hidden_state


def gradients(model, ids, **options):
    model.zero_grad()
    mask = options.get("attention_mask", torch.ones_like(ids)).unsqueeze(-1)
    (values(model, ids, **options).float() * mask).square().mean().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def check(got, want):
    assert [name for name, one in got.items() if one is None] == [name for name, one in want.items() if one is None]
    for name, one in want.items():
        if one is not None:
            most = 1e-4 if not name.endswith(CANCELLED) else 1e-2
            assert (got[name] - one).norm() <= most * one.norm(), name


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_those_of_eager(name):
    eager, ours = trained(name)
    ids, mask, positions = padded_batch()
    options = dict(attention_mask=mask, position_ids=positions)
    want, got = (gradients(model, ids, **options) for model in (eager, ours))
    check(got, want)
    learn = {name for name, one in got.items() if one is not None}
    assert any("kv_b_proj" in name for name in learn) or name == "deepseek_v4"
    assert not any("indexer" in name for name in learn)


@pytest.mark.parametrize("name", [name for name in MODELS if name != "deepseek_v4"])
def test_packed_documents(name):
    """As eager packs them; and the first one as it is alone."""
    eager, ours = trained(name)
    ids, lengths = padded_batch()[0][:1], (19, 1, 25)
    positions = torch.cat([torch.arange(length) for length in lengths]).unsqueeze(0)
    check(gradients(ours, ids, position_ids=positions), gradients(eager, ids, position_ids=positions))
    with torch.no_grad():
        packed, alone = (
            ours(
                ids[:, :some], position_ids=positions[:, :some], use_cache=False, output_hidden_states=True
            ).hidden_states[-1]
            for some in (45, 19)
        )
    torch.testing.assert_close(packed[:, :19], alone)


def test_documents_that_deepseek_v4_would_mix_are_refused():
    ids, positions = padded_batch()[0][:1], torch.cat([torch.arange(20), torch.arange(25)]).unsqueeze(0)
    with pytest.raises(ValueError, match="packed"):
        trained("deepseek_v4")[1](ids, position_ids=positions, use_cache=False)


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4"])
def test_activation_checkpointing(name):
    _, ours = trained(name)
    ids, *_ = padded_batch()
    want = gradients(ours, ids)
    want = {name: None if one is None else one.clone() for name, one in want.items()}
    ours.gradient_checkpointing_enable(gradient_checkpointing_kwargs=dict(use_reentrant=False))
    check(gradients(ours, ids), want)


@pytest.mark.parametrize("name", ["deepseek_v32", "deepseek_v4"])
def test_a_cache_is_refused(name):
    _, ours = trained(name)
    with pytest.raises(
        ValueError, match="^use_cache: got a cache where a gradient is wanted, allowed: use_cache=False"
    ):
        ours(padded_batch()[0], use_cache=True)


def test_steps_are_those_of_eager():
    """Three steps of an optimiser, whose losses then agree."""
    losses = []
    for model in trained("deepseek_v32"):
        optimizer, ids = torch.optim.SGD(model.parameters(), lr=0.02), padded_batch()[0]
        for _ in range(3):
            loss = model(ids, labels=ids, use_cache=False).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        losses.append(loss.item())
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)


def adapted(model, **options):
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    target = ["q_b_proj", "kv_b_proj", "o_proj"]
    model = peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=6, target_modules=target, **options))
    for name, parameter in model.named_parameters():
        if "lora_B" in name:  # which begins as 0
            parameter.data.normal_(0, 0.1)
    return model


@pytest.mark.parametrize("dora", [False, True])
def test_adapters_on_every_projection(dora):
    """kv_b_proj, which is not called, too: their gradients and the logits are those of eager, as are those of an
    adapter that is merged."""
    eager, ours = (adapted(copy.deepcopy(model).train(), use_dora=dora) for model in models("deepseek_v32"))
    ids = padded_batch()[0]
    want, got = gradients(eager, ids), gradients(ours, ids)
    check(got, want)
    assert sum(one is not None and "kv_b_proj" in name for name, one in got.items()) == (6 if dora else 4)
    with torch.no_grad():
        unmerged = ours.eval()(ids, use_cache=False).logits
        torch.testing.assert_close(ours.merge_and_unload()(ids, use_cache=False).logits, unmerged, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("options, message", [
    (dict(lora_dropout=0.1), "^kv_b_proj: got an adapter with dropout in training mode, allowed: lora_dropout=0.0"),
    (dict(lora_bias=True), "^kv_b_proj: got an adapter with a bias, allowed: lora_bias=False"),
])  # fmt: skip
def test_adapters_that_are_no_product_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        adapted(trained("deepseek_v32")[1], **options)(padded_batch()[0], use_cache=False)


def test_transformers_trainer_takes_the_steps_of_eager(tmp_path):
    pytest.importorskip("accelerate")
    from transformers import Trainer, TrainingArguments

    ids, losses = padded_batch()[0], []
    for model, name in zip(trained("deepseek_v32"), ("eager", "ours")):
        model.config.use_cache = False
        arguments = TrainingArguments(
            tmp_path / name, max_steps=3, learning_rate=1e-2, per_device_train_batch_size=3, report_to=[], use_cpu=True,
            save_strategy="no", logging_steps=1, disable_tqdm=True, max_grad_norm=0.0, optim="sgd",
        )  # fmt: skip
        trainer = Trainer(model, arguments, train_dataset=[dict(input_ids=row, labels=row) for row in ids])
        trainer.train()
        losses.append([one["loss"] for one in trainer.state.log_history if "loss" in one])
    assert len(losses[0]) == 3 and losses[1] == pytest.approx(losses[0], rel=1e-3)


def drifted(name):
    """(the model of a rollout, a trainer's whose indexers would select others)"""
    rollout = models(name)[1]
    trainer = copy.deepcopy(rollout)
    torch.manual_seed(1)
    for key, parameter in trainer.named_parameters():
        if "indexer" in key:
            parameter.data.normal_()
    return rollout, trainer


def recorded_of(model, ids):
    with torch.no_grad(), bridge.record_indices(model) as indices:
        values(model, ids)
    return indices


@pytest.mark.parametrize("name", REPLAYED)
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
