"""DSA models of transformers with our scores, selection and attention, against their own eager attention."""

import contextlib
import copy
import functools
import importlib
import sys
import types
from pathlib import Path

import pytest
import torch
from conftest import long
from support.bridged import MODELS, TOP_K, generating, models, padded_batch, stable
from torch.nn.utils.parametrize import register_parametrization

pytest.importorskip("transformers", minversion="5.24")

import transformers  # noqa: E402

import sparse_attn.integrations.transformers as bridge  # noqa: E402
from sparse_attn.framework.torch_private import EagerDispatchMode, schema  # noqa: E402
from sparse_attn.integrations.transformers import families, indexer, latent, windowed  # noqa: E402
from sparse_attn.integrations.transformers.bounds import row_bounds  # noqa: E402
from sparse_attn.integrations.transformers.refusals import check_absorbable  # noqa: E402

TOLERANCE = 2e-4


@pytest.fixture(autouse=True)
def _registered():
    bridge.register()
    yield
    bridge.unregister()


def first(output):
    return output[0] if isinstance(output, tuple) or "logits" not in output else output.logits


@pytest.mark.parametrize("name", MODELS if long() else ("glm_moe_dsa", "mistral_large4", "deepseek_v4"))
def test_generates_what_eager_generates(name):
    ids, mask, _ = padded_batch()
    options = dict(attention_mask=mask, max_new_tokens=40, do_sample=False, output_logits=True,
                   return_dict_in_generate=True, pad_token_id=0, eos_token_id=None)  # fmt: skip
    with stable():
        want, got = (model.generate(ids, **options) for model in generating(name))
    assert torch.equal(want.sequences, got.sequences)
    torch.testing.assert_close(torch.stack(got.logits), torch.stack(want.logits), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("left", (True, False))
@pytest.mark.parametrize("name", MODELS)
def test_a_padded_batch_is_what_eager_makes_of_it(name, left):
    ids, mask, positions = padded_batch(left=left)
    with stable():
        want, got = (first(m(ids, attention_mask=mask, position_ids=positions)) for m in models(name))
    torch.testing.assert_close(got[mask.bool()], want[mask.bool()], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", MODELS)
def test_chunks_with_a_cache_that_is_cropped_and_reordered(name):
    ids, mask, positions = padded_batch()
    order, results = torch.tensor([2, 0, 0]), []
    with stable():
        for model in models(name):
            cache, outputs = None, []
            for start, stop in ((0, 21), (21, 22), (22, 41)):
                output = model(
                    ids[:, start:stop], attention_mask=mask[:, :stop], position_ids=positions[:, start:stop],
                    cache=cache, use_cache=True,
                )  # fmt: skip
                cache = output.past_key_values
                outputs.append(first(output)[mask[:, start:stop].bool()])
            kept = 41 if name == "deepseek_v4" else 37  # transformers takes nothing back of V4's states
            if kept < 41:
                cache.crop(kept - 41)
            cache.reorder_cache(order)
            output = model(
                ids[order, kept:], attention_mask=mask[order], position_ids=positions[order, kept:], cache=cache
            )
            results.append(torch.cat([*outputs, first(output).flatten(0, 1)]))
    torch.testing.assert_close(results[1], results[0], atol=TOLERANCE, rtol=0)


def seen(function, ids, mask, positions):
    """Selections of each layer of the bridged V3.2 with ``function`` in the place of our selection."""
    rows = []

    def record(*args):
        rows.append(function(*args))
        return rows[-1]

    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(indexer, "select", record)
        models("deepseek_v32")[1](ids, attention_mask=mask, position_ids=positions)
    return torch.stack(rows)


def theirs(queries, weights, keys, bounds, top_k):
    """The indices that transformers' own indexer returns: masked positions where a row has fewer valid keys."""
    scores = torch.einsum("bsht,bsh->bst", torch.einsum("bshd,btd->bsht", queries, keys).relu(), weights)
    at = torch.arange(keys.shape[1])
    valid = (at >= bounds[..., :1]) & (at < bounds[..., 1:])
    return scores.masked_fill(~valid, -torch.inf).topk(min(top_k, keys.shape[1])).indices.int()


@pytest.mark.parametrize(("function", "good"), ((indexer.select, True), (theirs, False)))
def test_no_row_selects_beyond_its_position_or_inside_padding(function, good):
    ids, mask, positions = padded_batch()
    rows = seen(function, ids, mask, positions)[:, mask.bool()]
    sequence, at = mask.nonzero(as_tuple=True)
    start = mask.argmax(-1)[sequence]
    inside = (rows <= at[:, None]) & (rows >= start[:, None])
    assert ((rows == -1) | inside).all().item() is good
    if good:
        assert torch.equal((rows >= 0).sum(-1), (at - start + 1).clamp(max=TOP_K).expand(rows.shape[0], -1))


def test_rows_of_padding_see_nothing_and_lengths_that_collide_do_not_mix():
    mask = torch.tensor([[0, 1, 1, 0], [1, 1, 1, 1], [0, 0, 0, 0]])
    bounds = row_bounds(3, 4, 4, attention_mask=mask)
    assert bounds.squeeze(1).tolist() == [
        [[1, 1], [1, 2], [1, 3], [1, 1]], [[0, 1], [0, 2], [0, 3], [0, 4]], [[0, 0]] * 4,
    ]  # fmt: skip
    assert row_bounds(2, 2, 9, torch.tensor(2)).squeeze(1).tolist() == [[[0, 3], [0, 4]]] * 2


def test_a_cache_takes_the_bytes_it_took_and_no_mask_of_rows_times_keys_is_made():
    ids, mask, positions = padded_batch()
    caches = []
    with stable():
        for model in models("deepseek_v32"):
            output = model(ids, attention_mask=mask, position_ids=positions, use_cache=True)
            caches.append(output.past_key_values)
    layers = [cache.layers[1] for cache in caches]
    taken = [sum(part.numel() for part in (layer.keys, layer.values, layer.indexer_keys)) for layer in layers]
    assert taken[0] == taken[1]
    assert layers[1].get_seq_length() == 45


@pytest.mark.parametrize("block", ((16, 8), (128, 128), None))
def test_an_fp8_kv_b_proj_is_absorbed_and_not_kept_twice(block):
    from transformers.integrations.finegrained_fp8 import FP8Linear

    linear = FP8Linear(32, 2 * (20 + 24), block_size=block)
    scale_shape = linear.weight_scale_inv.shape
    linear.requires_grad_(False)
    linear.weight.copy_(torch.randn(linear.weight.shape).to(torch.float8_e4m3fn))
    linear.weight_scale_inv.copy_(torch.rand(scale_shape) + 0.5)
    before = dict(linear.named_parameters())
    to_key, to_value = latent.absorbed(linear, 2, 20, 24, torch.float32)
    scales = linear.weight_scale_inv
    want = torch.empty(88, 32)
    for row in range(88):
        for column in range(32):
            scale = scales if block is None else scales[row // block[0], column // block[1]]
            want[row, column] = linear.weight[row, column].float() * scale
    want = want.view(2, 44, 32)
    assert torch.equal(to_key, want[:, :20]) and torch.equal(to_value, want[:, 20:])
    assert all(parameter is before[name] for name, parameter in linear.named_parameters())


def test_a_plain_kv_b_proj_is_read_in_place():
    linear = torch.nn.Linear(32, 88, bias=False)
    for part in latent.absorbed(linear, 2, 20, 24, torch.float32):
        assert part.untyped_storage().data_ptr() == linear.weight.untyped_storage().data_ptr()


class Adapter(torch.nn.Linear):
    pass


class Linear(torch.nn.Module):
    """A layer and what an adapter adds to it: the shape, and the name, of peft's wrapper."""

    def __init__(self, base_layer):
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = torch.nn.Linear(base_layer.in_features, 3, bias=False)
        self.lora_B = torch.nn.Linear(3, base_layer.out_features, bias=False)

    weight = property(lambda self: self.base_layer.weight)
    bias = property(lambda self: self.base_layer.bias)

    def forward(self, inputs):
        return self.base_layer(inputs) + self.lora_B(self.lora_A(inputs))


class Packed(torch.Tensor):
    """As torchao's weights and torch's DTensor."""

    def __tensor_flatten__(self):
        raise NotImplementedError


class Bent(torch.nn.Module):
    """What no norm behind it takes back."""

    def forward(self, values):
        return values + values.roll(1, -1)


bent = Bent()


def hooked(module):
    module.register_forward_hook(lambda module, inputs, output: bent(output))
    return module


def hooked_before(module):
    module.register_forward_pre_hook(lambda module, inputs: (bent(inputs[0]), *inputs[1:]))
    return module


def overridden(module):
    forward = module.forward
    module.forward = lambda *args, **options: bent(forward(*args, **options))
    return module


def parametrized(module):
    register_parametrization(module, "weight", Bent())
    return module


def packed(linear):
    linear.weight = torch.nn.Parameter(linear.weight.as_subclass(Packed), requires_grad=False)
    return linear


def replaced(model, path, make):
    """Put ``make`` of the module at ``path`` of a layer's attention in its place."""
    for layer in model.model.layers:
        parent, _, name = path.rpartition(".")
        with contextlib.suppress(AttributeError):  # a layer that has none
            parent = layer.self_attn.get_submodule(parent)
            setattr(parent, name, make(parent.get_submodule(name)))
    return model.requires_grad_(False)


@pytest.mark.parametrize(
    ("name", "path", "make", "words"),
    (
        ("deepseek_v32", "kv_b_proj", Linear, "a Linear of test_hf_bridge, allowed: Linear of torch.nn.modules.linear"),
        ("deepseek_v32", "kv_b_proj", lambda _: Adapter(32, 176, bias=False), "a Adapter of test_hf_bridge"),
        ("deepseek_v32", "kv_b_proj", lambda _: torch.nn.Linear(32, 176), "a bias"),
        ("deepseek_v32", "kv_b_proj", lambda linear: linear.to("meta"), "a weight that is not on a device"),
        ("deepseek_v32", "kv_b_proj", packed, "a weight that is a Packed"),
        ("deepseek_v32", "kv_b_proj", parametrized, "a ParametrizedLinear of torch.nn.utils.parametrize"),
        ("deepseek_v32", "kv_b_proj", hooked, "a module with forward hooks"),
        ("deepseek_v32", "kv_b_proj", hooked_before, "a module with forward hooks"),
        ("deepseek_v32", "kv_b_proj", overridden, "a module with a forward of its own"),
        ("deepseek_v4", "compressor", hooked, "a module with forward hooks"),
        ("deepseek_v4", "compressor.indexer", overridden, "a module with a forward of its own"),
        ("deepseek_v4", "compressor.indexer.scorer", hooked_before, "a module with forward hooks"),
        ("deepseek_v4", "compressor.indexer.rotary_emb", hooked, "a module with forward hooks"),
    ),
)
def test_a_module_that_is_not_called_is_refused_where_a_call_would_do_more(name, path, make, words):
    ids, cache = torch.randint(2, 61, (2, 9)), transformers.DynamicCache(config=models(name)[1].config)
    changed = replaced(copy.deepcopy(models(name)[1]), path, make)
    with torch.no_grad(), pytest.raises(ValueError, match=f"{path}: got {words}"):
        changed(ids, cache=cache)
    assert cache.layers[1 if name == "deepseek_v4" else 0].keys is None  # the first of V4 has no compressor


def test_a_layer_is_absorbed_where_accelerate_moves_its_inputs_and_refused_where_it_offloads(monkeypatch):
    hooks = types.SimpleNamespace(AlignDevicesHook=type("AlignDevicesHook", (), dict(offload=False)))
    monkeypatch.setitem(sys.modules, "accelerate.hooks", hooks)
    linear = torch.nn.Linear(32, 88, bias=False)
    linear._hf_hook = hooks.AlignDevicesHook()
    linear.forward = functools.update_wrapper(functools.partial(linear.forward), linear.forward)
    check_absorbable(linear)
    linear._hf_hook.offload = True
    with pytest.raises(ValueError, match="a forward of its own, as accelerate gives to those that it offloads"):
        check_absorbable(linear)


CALLED = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", "indexer.wq_b", "indexer.wk", "indexer.weights_proj")
CALLED_BY_V4 = """
    q_a_proj q_b_proj kv_proj o_b_proj compressor.kv_proj compressor.gate_proj compressor.indexer.kv_proj
    compressor.indexer.gate_proj compressor.indexer.q_b_proj compressor.indexer.scorer.weights_proj""".split()
NORMS = ("q_a_norm", "kv_norm", "compressor.kv_norm", "compressor.indexer.kv_norm")


@pytest.mark.parametrize(
    ("name", "paths", "make"),
    (
        ("deepseek_v32", CALLED, Linear),
        ("deepseek_v4", CALLED_BY_V4, Linear),
        *(("deepseek_v4", NORMS, make) for make in (hooked, hooked_before, overridden, parametrized)),
    ),
)
def test_adapters_hooks_and_forwards_of_other_modules_do_what_they_do_in_eager(name, paths, make):
    ids, mask, positions = padded_batch()
    with stable():
        plain = models(name)[0](ids, attention_mask=mask, position_ids=positions).logits
        for path in paths:
            results = []
            for model in models(name):
                torch.manual_seed(0)
                changed = replaced(copy.deepcopy(model), path, make)
                results.append(changed(ids, attention_mask=mask, position_ids=positions).logits[mask.bool()])
            torch.testing.assert_close(results[1], results[0], atol=1e-3, rtol=0)
            assert (results[0] - plain[mask.bool()]).abs().max() > 0.01


def refused(words, model=None, **options):
    ids = torch.randint(2, 61, (2, 9))
    with pytest.raises(ValueError, match=words):
        (model or models("deepseek_v32")[1])(ids, **options)


def test_what_the_bridge_does_not_do_is_refused():
    hole = torch.tensor([[1, 1, 1, 0, 1, 1, 1, 1, 1]] * 2)
    with torch.no_grad():
        refused("attention_mask: got padding between tokens", attention_mask=hole)
        refused("attention_mask: got a mask that the caller", attention_mask=torch.zeros(2, 1, 9, 9))
        refused("output_attentions: got True", output_attentions=True)
    trained = copy.deepcopy(models("deepseek_v32")[1]).requires_grad_()
    refused("use_cache: got a cache where a gradient is wanted", trained)
    trained.train()
    for layer in trained.model.layers:
        layer.self_attn.attention_dropout = 0.5
    with torch.no_grad():
        refused("attention_dropout: got 0.5 in training mode", trained)


def test_a_vision_tower_under_the_bridge_is_refused_with_what_to_pass():
    tower = copy.deepcopy(generating("mistral_large4")[1].model.vision_tower)
    tower.set_attn_implementation("sparse_attn")
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match="sparse_attn for a PixtralAttention, allowed: .*vision_config"),
    ):
        tower(torch.zeros(1, 3, 8, 8), image_sizes=[(8, 8)])


@pytest.mark.parametrize("name", MODELS)
def test_bf16_strays_from_fp32_no_farther_than_eager(name):
    """By the mean: an expert or a key that rounding selects instead makes single values stray."""
    ids, mask, positions = padded_batch()
    with stable():
        want = first(models(name)[0](ids, attention_mask=mask, position_ids=positions))
        errors = []
        for model in models(name):
            got = first(copy.deepcopy(model).bfloat16()(ids, attention_mask=mask, position_ids=positions))
            errors.append((got.float() - want)[mask.bool()].abs().mean().item())
    assert 0 < errors[1] < 1.25 * errors[0]


@pytest.mark.parametrize("name", ("deepseek_v32", "deepseek_v4"))
def test_a_device_map_deals_layers_to_devices(name, tmp_path):
    pytest.importorskip("accelerate")
    eager, bridged = models(name)
    ids, mask, positions = padded_batch()
    bridged.save_pretrained(tmp_path)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, attn_implementation="sparse_attn", device_map={"": device}
    )
    with stable():
        want = eager(ids, attention_mask=mask, position_ids=positions).logits
        got = loaded(ids.to(device), attention_mask=mask.to(device), position_ids=positions.to(device)).logits.cpu()
    torch.testing.assert_close(got[mask.bool()], want[mask.bool()], atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", families.REFUSED)
def test_models_that_the_bridge_does_not_run_are_refused_by_name(name):
    prefix, _ = families.REFUSED[name]
    attention = getattr(families._modeling(name), f"{prefix}Attention")
    module = attention.__new__(attention)
    torch.nn.Module.__init__(module)
    module.config = transformers.PreTrainedConfig(attn_implementation="sparse_attn")
    with pytest.raises(ValueError, match=f"sparse_attn for {name}: "):
        module(torch.zeros(1, 1, 8))


def test_every_model_with_an_indexer_is_run_or_refused_by_name():
    folder = Path(transformers.__file__).parent / "models"
    found = {path.parent.name for path in folder.glob("*/modeling_*.py") if "Indexer(nn.Module)" in path.read_text()}
    assert found == {family.module for family in families.FAMILIES} | {families.WINDOWED, *families.REFUSED}


@pytest.mark.parametrize("name", ("deepseek_v32", "deepseek_v4"))
def test_a_saved_model_has_the_same_weights_and_needs_no_bridge(name, tmp_path):
    eager, bridged = models(name)
    ids, mask, positions = padded_batch()
    with stable():
        bridged(ids, attention_mask=mask, position_ids=positions)
        bridged.save_pretrained(tmp_path)
        bridge.unregister()
        loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
        weights = loaded.state_dict()
        assert weights.keys() == eager.state_dict().keys()
        assert all(torch.equal(weights[name], weight) for name, weight in eager.state_dict().items())
        got, want = (m(ids, attention_mask=mask, position_ids=positions).logits for m in (loaded, eager))
    assert torch.equal(got, want)


def test_another_implementation_and_unregister_leave_the_model_as_it_was():
    eager, bridged = models("deepseek_v32")
    ids, mask, positions = padded_batch()
    attention, index = type(bridged.model.layers[0].self_attn), type(bridged.model.layers[0].self_attn.indexer)
    with stable():
        want = eager(ids, attention_mask=mask, position_ids=positions).logits
        ours, indexers = dict(attention.__dict__), dict(index.__dict__)
        bridged.set_attn_implementation("eager")
        assert torch.equal(bridged(ids, attention_mask=mask, position_ids=positions).logits, want)
        bridged.set_attn_implementation("sparse_attn")
        bridge.unregister()
        for owner, before, names in ((attention, ours, ("forward", "expand_kv")), (index, indexers, ("forward",))):
            for name in names:
                assert owner.__dict__[name] is before[name].__wrapped__
        fresh = copy.deepcopy(eager)
        assert torch.equal(fresh(ids, attention_mask=mask, position_ids=positions).logits, want)
    with pytest.raises(ValueError, match="sparse_attn"):
        fresh.set_attn_implementation("sparse_attn")


def test_assisted_generation_is_greedy_generation():
    ids = padded_batch()[0][:1]
    options = dict(max_new_tokens=12, do_sample=False)
    _, bridged = models("deepseek_v32")
    with torch.no_grad():
        want = bridged.generate(ids, **options)
        got = bridged.generate(ids, assistant_model=models("axk2")[1], **options)
    assert torch.equal(got, want)


def test_a_mask_that_an_assistant_infers_is_refused_with_how_to_have_none():
    """transformers drops a mask of ones, and the assistant then takes pad_token_id in the text for padding."""
    ids, mask, _ = (value[:1] for value in padded_batch())
    (eager, bridged), assistant = models("deepseek_v32"), models("axk2")[1]
    options = dict(attention_mask=mask, max_new_tokens=12, do_sample=False, pad_token_id=int(ids[0, 10]))
    with stable():
        want = eager.generate(ids, **options)
        assert torch.equal(bridged.generate(ids, **options), want)
        with pytest.raises(
            ValueError, match="attention_mask: got padding between tokens.*: a pad_token_id that no text holds"
        ):
            bridged.generate(ids, assistant_model=assistant, **options)
        for free in (options | dict(eos_token_id=options["pad_token_id"]), options | dict(pad_token_id=61)):
            want = eager.generate(ids, **free)
            assert torch.equal(bridged.generate(ids, assistant_model=assistant, **free), want)


class Calls(EagerDispatchMode):
    """Notes the calls of this library's operators."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "sparse_attn":
            self.seen.append((func, args))
        return func(*args, **(kwargs or {}))

    def __enter__(self):
        self.seen = []
        return super().__enter__()


def forms_of(calls):
    """What a GPU would compile for these calls: kernels with constants, alignments and options."""
    from sparse_attn.testing.launches import recording

    found = set()
    for func, (*args, _) in calls:
        name = schema(func).name.removeprefix("sparse_attn::")
        package = {"build_ragged_indices_from_dense": "ragged.lists", "sparse_attn_decode": "attention.sparse",
                   "sparse_attn_prefill": "attention.sparse", "index_topk_prefill": "topk.fused",
                   "index_topk_decode_slots": "topk.fused"}[name]  # fmt: skip
        launch = importlib.import_module(f"sparse_attn.ops.{package}.launch")
        with recording("sm_90") as launches:
            getattr(launch, name)(*(value.to("meta") if isinstance(value, torch.Tensor) else value for value in args))
        found |= {one[2:] for one in launches}
    return found


@pytest.mark.few(2)
@pytest.mark.parametrize("batch", (1, 3))
@pytest.mark.parametrize("name", ("deepseek_v32", "deepseek_v4"))
def test_a_growing_cache_has_no_kernel_compiled_for_its_length(name, batch):
    pytest.importorskip("triton")
    ids, _, _ = padded_batch(rows=84, padding=(0,) * batch)
    bridged, cache, seen = models(name)[1], None, []
    with torch.no_grad():
        for start, stop in ((0, 48), *((at, at + 1) for at in range(48, 84))):
            with Calls() as calls:
                cache = bridged(ids[:, start:stop], cache=cache, use_cache=True).past_key_values
            seen.append(forms_of(calls.seen))
    known = set().union(*seen[:25])  # 24 lengths have every alignment, and a whole entry of every layer
    assert known and all(forms <= known for forms in seen[25:])


@pytest.mark.parametrize(("name", "module"), (("deepseek_v32", latent), ("deepseek_v4", windowed)))
def test_rows_are_attended_in_parts_of_any_size(name, module, monkeypatch):
    ids, mask, positions = padded_batch()
    bridged = models(name)[1]
    with torch.no_grad():
        want = bridged(ids, attention_mask=mask, position_ids=positions).logits
        monkeypatch.setattr(module, "ROWS", 45 + 7)  # parts that end within a sequence
        got = bridged(ids, attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_a_gpu_gives_what_eager_gives_on_a_cpu(name):
    ids, mask, positions = padded_batch()
    eager, bridged = models(name)
    with stable():
        want = first(eager(ids, attention_mask=mask, position_ids=positions))
        on_gpu = copy.deepcopy(bridged).cuda()
        got = first(on_gpu(ids.cuda(), attention_mask=mask.cuda(), position_ids=positions.cuda())).cpu()
    torch.testing.assert_close(got[mask.bool()], want[mask.bool()], atol=1e-3, rtol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ("latent_call", "growing_call", "static_call"))
def test_prefill_of_4096_rows_at_131072_keys_takes_at_most_1536_mib(name, monkeypatch):
    from benchmarks import bridge as suite
    from benchmarks.run import Run

    with torch.no_grad():
        call = getattr(suite, name)(Run(), "sparse_attn", 131072, 4096)
        call()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call()
        torch.cuda.synchronize()
    taken = (torch.cuda.max_memory_allocated() - before) >> 20
    print(f"{name}: {taken} MiB")
    assert taken <= 1536


@pytest.mark.gpu
@pytest.mark.parametrize("name", MODELS)
def test_a_forward_leaves_no_memory_behind(name):
    ids, mask, positions = (value.cuda() for value in padded_batch())
    bridged = copy.deepcopy(models(name)[1]).cuda()
    with torch.no_grad():
        for model_is_warm in (False, True):
            before = torch.cuda.memory_allocated()
            first(bridged(ids, attention_mask=mask, position_ids=positions, use_cache=False))
            torch.cuda.synchronize()
            if model_is_warm:
                assert torch.cuda.memory_allocated() == before
