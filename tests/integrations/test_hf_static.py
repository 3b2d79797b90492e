"""Static caches of models of transformers, and the bridge's own one for DeepSeek-V4: compiled steps, cut and reordered
batches, and what does not fit."""

import copy

import pytest
import torch
from conftest import long
from support import bridged as bridged_support
from support.bridged import MODELS, generating, models, padded_batch, stable

pytest.importorskip("transformers", minversion="5.24")

import transformers  # noqa: E402
from transformers.cache_utils import Cache, StaticSlidingWindowLayer  # noqa: E402

import sparse_attn.integrations.transformers as bridge  # noqa: E402
from sparse_attn.integrations.transformers import static  # noqa: E402

TOLERANCE = 2e-4
V4 = "deepseek_v4"
CUTS = ((0, 45), (0, 21, 22, 41, 45), (0, 1, 2, 3, 45), (0, 11, 12, 13, 24, 25, 30, 45))
COMPILED = MODELS if long() else ("deepseek_v32", V4)


@pytest.fixture(autouse=True)
def _registered():
    bridge.register()
    yield
    bridge.unregister()


def logits_of(output):
    return output[0] if isinstance(output, tuple) or "logits" not in output else output.logits


def in_chunks(model, cuts, cache=None, step=None, width=None):
    """Logits [batch, 45, vocabulary] of a left-padded batch, in chunks that end at ``cuts``. step: what runs a single
    row, in place of the model. width: of the mask, which is that of the chunk's end where it is None."""
    ids, mask, positions = padded_batch()
    outputs = []
    for start, stop in zip(cuts, cuts[1:]):
        seen = torch.zeros(3, width or stop, dtype=torch.long)
        seen[:, :stop] = mask[:, :stop]
        with torch.compiler.set_stance("default" if len(outputs) < 2 or step is None else "fail_on_recompile"):
            output = (model if step is None or stop - start > 1 else step)(
                ids[:, start:stop], attention_mask=seen, position_ids=positions[:, start:stop], cache=cache,
                use_cache=True,
            )  # fmt: skip
        cache = output.past_key_values if cache is None else cache
        outputs.append(logits_of(output))
    return torch.cat(outputs, 1)[mask.bool()]


@pytest.mark.parametrize("cuts", CUTS)
def test_chunks_on_a_static_cache_are_what_eager_makes_of_them(cuts):
    eager, bridged = models(V4)
    with stable():
        got = in_chunks(bridged, cuts, bridge.static_cache(bridged, 45))
        torch.testing.assert_close(got, in_chunks(eager, cuts), atol=TOLERANCE, rtol=0)


def test_heads_that_attend_apart_give_what_eager_makes_of_them(monkeypatch):
    monkeypatch.setattr(static, "SWAP_AB_HEADS", 2)
    monkeypatch.setattr(static, "heads_at_once", lambda batch, keys: 2)
    eager, bridged = models(V4)
    cuts = (0, 3, 4, 5, 30, *range(31, 46))
    with stable():
        got = in_chunks(bridged, cuts, bridge.static_cache(bridged, 45))
        torch.testing.assert_close(got, in_chunks(eager, cuts), atol=TOLERANCE, rtol=0)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", COMPILED)
def test_a_compiled_step_on_a_static_cache_never_compiles_again(name):
    eager, bridged = models(name)
    cuts = (0, 30, *range(31, 46))
    torch.compiler.reset()
    step = torch.compile(bridged, fullgraph=True, backend="aot_eager" if long() else "eager")
    with stable():
        want = in_chunks(eager, cuts)
        got = in_chunks(bridged, cuts, bridge.static_cache(bridged, 64), step, width=64)
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("name", MODELS if long() else ("deepseek_v32", V4))
def test_generates_on_a_static_cache(name):
    ids, mask, _ = padded_batch()
    options = dict(attention_mask=mask, max_new_tokens=8, do_sample=False, disable_compile=True, eos_token_id=None)
    bridged = generating(name)[1]
    with torch.no_grad():
        want, cache = bridged.generate(ids, **options), bridge.static_cache(bridged, 60)
        assert torch.equal(bridged.generate(ids, cache=cache, **options), want)
        cache.reset()
        assert torch.equal(bridged.generate(ids, cache=cache, **options), want)
        if name != V4:
            assert torch.equal(bridged.generate(ids, cache_implementation="static", **options), want)


def test_a_static_cache_is_reordered_where_it_lies():
    ids, mask, positions = padded_batch()
    eager, bridged = models(V4)
    order, results = torch.tensor([2, 0, 0]), []
    with stable():
        for model, cache in ((eager, None), (bridged, bridge.static_cache(bridged, 45))):
            output = model(
                ids[:, :30], attention_mask=mask[:, :30], position_ids=positions[:, :30], cache=cache, use_cache=True
            )
            cache = output.past_key_values
            lies = cache.layers[1].keys.data_ptr()
            cache.reorder_cache(order)
            assert model is eager or cache.layers[1].keys.data_ptr() == lies
            output = model(ids[order, 30:], attention_mask=mask[order], position_ids=positions[order, 30:], cache=cache)
            results.append(output.logits[mask[order, 30:].bool()])
    torch.testing.assert_close(results[1], results[0], atol=TOLERANCE, rtol=0)


def test_a_static_cache_of_v4_holds_a_window_and_entries():
    bridged = models(V4)[1]
    cache = bridge.static_cache(bridged.config, 1024)
    with torch.no_grad():
        bridged(torch.randint(2, 61, (2, 9)), cache=cache)
    window, selecting, pooling, _ = cache.layers
    assert window.keys.shape == (2, 32, 32) and not window.pools  # a window of 12, in lines of 32
    entries = {name: tuple(pool.entries.shape) for name, pool in selecting.pools.items()}
    assert entries == {
        "compressor": (2, 320, 32),
        "indexer": (2, 320, 16),
    }  # 1024 / 4, two to spare, in lines of 32, and a window
    assert pooling.pools["compressor"].entries.shape == (2, 128, 32)
    assert all(layer.keys is layer.pools["compressor"].entries for layer in (selecting, pooling))
    assert cache.get_seq_length().item() == 9 and cache.get_max_length() == 1024 and cache.is_compileable
    assert not cache.is_croppable


def test_other_families_have_the_static_cache_of_transformers():
    cache = bridge.static_cache(models("glm_moe_dsa")[1], 64)
    assert isinstance(cache, transformers.StaticCache) and cache.get_max_length() == 64


def test_what_does_not_fit_a_static_cache_is_refused():
    eager, bridged = models(V4)
    ids = torch.randint(2, 61, (2, 9))
    cache = bridge.static_cache(bridged, 12)
    with torch.no_grad():
        bridged(ids, cache=cache)
        with pytest.raises(ValueError, match="tokens_to_remove: got -1"):
            cache.crop(-1)
        with pytest.raises(ValueError, match="cache: got more tokens than fit, allowed: max_len = 12"):
            bridged(ids, cache=cache)
        with pytest.raises(ValueError, match="a static cache of sparse_attn under another implementation"):
            eager(ids, cache=bridge.static_cache(eager, 12))
        with pytest.raises(
            ValueError, match="cache: got a layer StaticSlidingWindowLayer, which has no room for entries"
        ):
            bridged(ids, cache=Cache(layers=[StaticSlidingWindowLayer(12, 12) for _ in bridged.model.layers]))
    with pytest.raises(ValueError, match="max_len: got 0"):
        bridge.static_cache(bridged, 0)
    with pytest.raises(ValueError, match="model: got llama, allowed: deepseek_v32"):
        bridge.static_cache(transformers.LlamaConfig(), 12)
    with pytest.raises(ValueError, match="model: got dots3_note: some layers"):
        bridge.static_cache(transformers.AutoConfig.for_model("dots3_note"), 12)


def filled(model, make, rows=30):
    """A cache of the first ``rows`` rows."""
    ids, mask, positions = padded_batch()
    cache = make(config=model.config.get_text_config(), max_cache_len=45)
    model(ids[:, :rows], attention_mask=mask[:, :rows], position_ids=positions[:, :rows], cache=cache)
    return cache


def after(model, cache, rows=30):
    ids, mask, positions = padded_batch()
    options = dict(attention_mask=mask, position_ids=positions[:, rows:], cache=cache)
    return logits_of(model(ids[:, rows:], **options))[mask[:, rows:].bool()]


def growing(config, **others):
    return transformers.DynamicCache(config=config)


@pytest.mark.parametrize("make", (growing, transformers.StaticCache))
@pytest.mark.parametrize("name", MODELS)
def test_a_cache_that_another_implementation_has_filled_is_continued_or_refused(name, make):
    eager, bridged = models(name)
    if name == V4 and make is not growing:
        return
    with stable():
        for first, then, other in ((eager, bridged, "another implementation"), (bridged, eager, "sparse_attn")):
            cache = filled(first, make)
            want = after(first, copy.deepcopy(cache))
            if name == V4:
                torch.testing.assert_close(after(then, cache), want, atol=TOLERANCE, rtol=0)
                continue
            with pytest.raises(ValueError, match=f"cache: got one that {other} has filled, allowed: an empty one, or"):
                after(then, cache)
            assert torch.equal(after(first, cache), want)  # nothing was written


@pytest.mark.parametrize("name", ("deepseek_v32", "mistral_large4", V4))
def test_a_static_cache_that_is_too_small_is_refused_and_stays_as_it_was(name):
    bridged = models(name)[1]
    ids = padded_batch()[0]
    with torch.no_grad():
        cache, wide = (bridge.static_cache(bridged, length) for length in (40, 45))
        for held in (cache, wide):
            with pytest.raises(ValueError, match="cache: got more tokens than fit, allowed: max_len = 4[05]"):
                bridged(torch.cat([ids, ids[:, :1]], 1), cache=held)
            bridged(ids[:, :30], cache=held)
        with pytest.raises(ValueError, match="cache: got more tokens than fit, allowed: max_len = 40"):
            bridged(ids[:, 30:41], cache=cache)
        got, want = (logits_of(bridged(ids[:, 30:40], cache=held)) for held in (cache, wide))
        torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=0)
        with pytest.raises(ValueError, match="cache: got more tokens than fit, allowed: max_len = 40"):
            bridged(ids[:, 40:41], cache=cache)


def test_a_cache_without_room_for_entries_is_refused_with_what_to_pass():
    eager, bridged = models(V4)
    ids = padded_batch()[0]
    allowed = r"allowed: DynamicCache\(config=model.config\), or bridge.static_cache"
    with torch.no_grad():
        with pytest.raises(ValueError, match=f"cache: got none of its layers, {allowed}"):
            bridged(ids, cache=transformers.DynamicCache())
        other = transformers.DynamicCache(config=transformers.LlamaConfig(num_hidden_layers=4))
        with pytest.raises(
            ValueError, match=f"cache: got a layer DynamicLayer, which has no room for entries, {allowed}"
        ):
            bridged(ids, cache=other)
        for model in (eager, bridged):
            with pytest.raises(
                ValueError, match="for deepseek_v4, for which transformers has none, allowed: .*bridge.static"
            ):
                model.generate(ids, max_new_tokens=2, cache_implementation="static")
    bridge.unregister()
    with pytest.raises(KeyError):
        transformers.StaticCache(config=eager.config, max_cache_len=12)


@pytest.mark.gpu
def test_a_captured_step_of_v4_serves_every_length():
    ids, mask, positions = (value.cuda() for value in padded_batch())
    bridged = copy.deepcopy(models(V4)[1]).cuda()
    bridged.set_experts_implementation("batched_mm")
    growing, cache = transformers.DynamicCache(config=bridged.config), bridge.static_cache(bridged, 64)
    seen = torch.zeros(3, 64, dtype=torch.long, device="cuda")
    seen[:, :31] = mask[:, :31]
    token, place = ids[:, 30:31].clone(), positions[:, 30:31].clone()

    def step():
        return bridged(token, attention_mask=seen, position_ids=place, cache=cache).logits

    with torch.no_grad():
        for held in (growing, cache):
            bridged(ids[:, :30], attention_mask=mask[:, :30], position_ids=positions[:, :30], cache=held)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            step()  # compiles kernels; what it wrote is written again
        for layer in cache.layers:
            layer.cumulative_length.fill_(30)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            got = step()
        for at in range(30, 45):
            seen[:, at] = mask[:, at]
            token.copy_(ids[:, at, None])
            place.copy_(positions[:, at, None])
            graph.replay()
            want = bridged(
                ids[:, at, None], attention_mask=mask[:, : at + 1], position_ids=positions[:, at, None], cache=growing
            ).logits
            torch.testing.assert_close(got, want, atol=1e-3, rtol=0)


@pytest.mark.gpu
def test_heads_of_bf16_rows_attend_apart_as_together():
    """On Hopper 64 heads are two rows of 32 to another kernel."""
    sizes = dict(num_attention_heads=64, head_dim=512, partial_rotary_factor=0.125, index_head_dim=64)
    torch.manual_seed(0)
    config = transformers.DeepseekV4Config(**bridged_support.V4 | sizes, initializer_range=0.1)
    model = transformers.DeepseekV4ForCausalLM(config).eval().requires_grad_(False).bfloat16().cuda()
    model.set_attn_implementation("sparse_attn")
    model.set_experts_implementation("batched_mm")
    ids, mask, positions = (value.cuda() for value in padded_batch())
    cache, results = bridge.static_cache(model, 64), []
    seen = torch.zeros(3, 64, dtype=torch.long, device="cuda")
    seen[:, :31] = mask[:, :31]
    with torch.no_grad():
        model(ids[:, :30], attention_mask=mask[:, :30], position_ids=positions[:, :30], cache=cache)
        for most in (32, None):
            for layer in cache.layers:
                layer.cumulative_length.fill_(30)
                layer.most_heads = most
            results.append(
                model(ids[:, 30:31], attention_mask=seen, position_ids=positions[:, 30:31], cache=cache).logits.float()
            )
    torch.testing.assert_close(*results, atol=0.03 * results[0].abs().max().item(), rtol=0)


@pytest.mark.gpu
def test_generates_on_a_static_cache_compiled_by_transformers():
    """On a GPU ``generate`` compiles decode steps on such a cache by itself, with CUDA graphs."""
    bridged = copy.deepcopy(models(V4)[1]).cuda()
    bridged.set_experts_implementation("batched_mm")
    ids, mask, _ = padded_batch()
    options = dict(attention_mask=mask.cuda(), max_new_tokens=8, do_sample=False)
    with torch.no_grad():
        want = bridged.generate(ids.cuda(), **options)
        got = bridged.generate(ids.cuda(), cache=bridge.static_cache(bridged, 64), **options)
    assert torch.equal(got, want)
