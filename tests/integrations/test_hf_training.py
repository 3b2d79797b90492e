"""Models of transformers that train under the bridge, beside their own eager attention."""

import copy

import pytest
import torch
from support.bridged import MODELS, models, padded_batch
from support.parity import stable_topk

import sparse_attn.integrations.transformers as bridge

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


def gradients(model, ids, **options):
    model.zero_grad()
    output = model(ids, use_cache=False, **options)
    values = output.logits if hasattr(output, "logits") else output.last_hidden_state
    mask = options.get("attention_mask", torch.ones_like(ids)).unsqueeze(-1)
    (values.float() * mask).square().mean().backward()
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
