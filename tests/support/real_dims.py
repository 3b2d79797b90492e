"""A layer at a model's real dimensions, by the kernels and by the references.

Two runs over the same prompts, prefilled in two chunks and then decoded together, weights bf16, caches fp8:

1. by the kernels, where every op also runs as its reference on the same inputs. Bytes and integers must be equal, with
   two exceptions: a selection may swap keys whose scores nearly tie, the router may swap experts that nearly tie;
2. by the references alone, made to select and to route as the first run did. What is left to differ is rounding.

Bounds, u = 2**-8 being bf16's largest relative rounding, and u / sqrt(3) at most its root mean square:

- scores: compare.LOGITS_DIFF allows a relative error of sqrt(2 * LOGITS_DIFF) in root mean square; a key counts
  as nearly tied within TIE = 4 times that of the row's k-th best score;
- attention: the kernels round the probabilities, so an element is off by at most u * max|v|, beside u of itself for the
  output; both outputs are rounded as well, three roundings of relative square u**2 / 3 each: cosine difference
  u**2 / 2;
- logits: between the attention and the logits lie at most 16 roundings in each run, of independent sign, and nothing
  that amplifies: sqrt(2 * 16) * u / sqrt(3) of the logits' root mean square, row by row.
"""

import math

import pytest
import torch
from support import requests
from support.requests import Requests

from sparse_attn import pipeline
from sparse_attn.layout import storage_extent
from sparse_attn.models import mla, moe
from sparse_attn.models.params import hold, model_rope_tables, param_dtype
from sparse_attn.models.shapes import param_shapes
from sparse_attn.ops.indexer.scores import reference as scores_of
from sparse_attn.pipeline import latent, select
from sparse_attn.spec import Spec
from sparse_attn.testing import compare

U = 2.0**-8
TIE = 4 * math.sqrt(2 * compare.LOGITS_DIFF)
SWAPPED = 5e-3  # of all selected keys
REROUTED = 2e-3  # of all rows, as tests/ops/test_router.py allows
LOGITS = math.sqrt(2 * 16 / 3) * U
LSE = (1e-3, 2.01 / 65536, 1e-6)  # absolute for rows of few keys, whose lse is a sum of products that cancel
ROWS_AT_ONCE = 256


def weights_of(spec, device, seed=0):
    """bf16 weights of unit gain, drawn where they are used."""
    generator = torch.Generator(device).manual_seed(seed)
    params = {}
    for name, shape in param_shapes(spec).items():
        value = torch.empty(shape, dtype=param_dtype(name, torch.bfloat16), device=device)
        fan_in = shape[-2] if name.endswith(("w_uk", "w_uv")) else shape[-1]
        low, high = -1.0, 1.0
        if name.endswith("norm"):
            low, high = 0.9, 1.1
        elif name.endswith("bias"):
            low, high = -0.1, 0.1
        elif name.endswith(".scale"):
            low, high = 0.9, 1.1
        elif name.endswith("table"):
            value = torch.rand(shape[0], spec.moe.num_experts, generator=generator, device=device)
            params[name] = hold(value.argsort(1)[:, : shape[1]].int())
            continue
        elif name != "embed" and not name.endswith((".base", ".sink")):
            low, high = -((3 / fan_in) ** 0.5), (3 / fan_in) ** 0.5
        params[name] = hold(value.uniform_(low, high, generator=generator))
    params |= model_rope_tables(spec, device)
    return params


# --- one check per kind of result


def bits(value):
    return value.contiguous().view(torch.uint8)


def check_equal(name, got, want, *_):
    """Bit for bit, in any nesting of tuples."""
    if isinstance(got, (tuple, list)):
        for one, other in zip(got, want, strict=True):
            check_equal(name, one, other)
    elif isinstance(got, torch.Tensor):
        assert got.dtype == want.dtype and torch.equal(bits(got), bits(want)), name
    else:
        assert got == want, name


def check_attention(name, got, want, arguments, keywords):
    if "layout" in keywords:  # values of a paged cache: nothing is larger than what its codes and scales say
        layout, cache = keywords["layout"], arguments[1]
        read = arguments[2].indices[: int(arguments[2].indptr[-1])].long()
        largest = layout.decode(cache, read)[:, : layout.value_dim].abs().max()
        if keywords.get("extra_cache") is not None:
            entries = keywords["extra_ragged"]
            read = entries.indices[: int(entries.indptr[-1])].long()
            rows = keywords["extra_layout"].decode(keywords["extra_cache"], read)
            largest = max(largest, rows.abs().max()) if len(rows) else largest
    else:
        largest = arguments[1][..., : keywords["d_v"]].abs().max()
    assert got.out.dtype == want.out.dtype and got.out.isfinite().all() and want.out.isfinite().all(), name
    for some in torch.arange(got.out.shape[0], device=got.out.device).split(ROWS_AT_ONCE):
        out, wanted = got.out[some].float(), want.out[some].float()
        error = (out - wanted).abs()
        assert (error <= U * (largest + 2 * wanted.abs())).all(), f"{name}: off by {error.max():.2e}"
        difference = compare.similarity_difference(out, wanted)
        assert difference <= U**2 / 2, f"{name}: cosine difference {difference:.2e}"
    compare.assert_close(got.lse, want.lse, LSE, f"{name} lse")


def chosen_columns(topk, width):
    """Top-k rows -> bool [rows, width]."""
    chosen = torch.zeros(topk.shape[0], width + 1, dtype=torch.bool, device=topk.device)
    chosen.scatter_(1, torch.where(topk < 0, width, topk).long(), True)
    return chosen[:, :width]


def check_selection(name, got, want, scores):
    """got, want: top-k rows in columns of ``scores`` [rows, width]."""
    assert torch.equal((got >= 0).sum(1), (want >= 0).sum(1)), f"{name}: numbers of keys"
    assert ((got[:, 1:] > got[:, :-1]) | (got[:, 1:] < 0)).all(), f"{name}: order"
    ours, theirs = chosen_columns(got, scores.shape[1]), chosen_columns(want, scores.shape[1])
    seen = scores > -math.inf
    spread = torch.where(seen, scores, 0).double().pow(2).sum(1).div(seen.sum(1).clamp_min(1)).sqrt()
    worst = torch.where(ours, scores, math.inf).amin(1)
    least = torch.where(theirs, scores, math.inf).amin(1)
    short = torch.where(least.isinf(), 0, (least - worst) / spread.clamp_min(1e-30))
    assert (short <= TIE).all(), f"{name}: a key {float(short.max()):.2e} of the scores below the last one wanted"
    swapped = (ours & ~theirs).sum() / theirs.sum().clamp_min(1)
    assert swapped <= SWAPPED, f"{name}: {float(swapped):.2e} of the keys swapped"


def check_prefill_topk(name, got, want, arguments, keywords):
    q, weights, keys, scale, start, end = arguments[:6]
    scores = scores_of.mqa_logits(q, keys, scale, weights, start, end, keywords["flavour"])
    column = torch.arange(scores.shape[1], device=q.device) + start.unsqueeze(1)
    padded = torch.cat([scores, torch.full_like(scores[:, :1], -math.inf)], 1)
    check_selection(name, got, want, padded.gather(1, column.clamp_max(scores.shape[1])))


def check_decode_slots(name, got, want, arguments, keywords):
    q, weights, cache, lens, table, top_k, context, layout = arguments
    got, want = (positions_of(slots, table, cache.shape[1], q.shape[1], top_k) for slots in (got, want))
    check_selection(name, got, want, scores_of.paged_mqa_logits(q, cache, weights, lens, table, context, layout.name))


def positions_of(ragged, table, block_size, next_n, top_k):
    """Slots of decode rows -> int32 [rows, top_k], positions within the row's request, -1 behind them."""
    rows, bounds = ragged.indptr.shape[0] - 1, ragged.indptr.tolist()
    out = torch.full((rows, top_k), -1, dtype=torch.int32, device=table.device)
    for row, (first, last) in enumerate(zip(bounds, bounds[1:])):
        slots = ragged.indices[first:last]
        column = (slots.unsqueeze(1) // block_size == table[row // next_n]).int().argmax(1)
        out[row, : last - first] = column * block_size + slots % block_size
    assert (ragged.indices[bounds[-1] :] == -1).all()
    return out


def check_routing(name, got, want, *_):
    (weights, ids), (wanted_weights, wanted_ids) = got, want
    same = (ids == wanted_ids).all(1)
    assert (~same).float().mean() <= REROUTED, name
    torch.testing.assert_close(weights[same], wanted_weights[same], rtol=1e-5, atol=1e-6)


CHECKED = {
    (requests, "build_step_plan"): check_equal,
    (latent, "indexer_k_quant_and_cache"): check_equal,
    (latent, "write_kv_cache"): check_equal,
    (mla, "indexer_q_rope_quant"): check_equal,
    (select, "gather_indexer_k"): check_equal,
    (latent, "gather_kv_cache"): check_equal,
    (select, "index_topk_prefill"): check_prefill_topk,
    (select, "index_topk_decode_slots"): check_decode_slots,
    (latent, "build_ragged_indices_from_dense"): check_equal,
    (latent, "sparse_attn_prefill"): check_attention,
    (latent, "sparse_attn_decode"): check_attention,
    (moe, "biased_grouped_topk"): check_routing,
}
WRITERS = {"indexer_k_quant_and_cache": (1,), "write_kv_cache": (2,), "compress_and_cache": (6, 8)}  # what they write
CHOICES = ("index_topk_prefill", "index_topk_decode_slots", "biased_grouped_topk")


def shadow(patch, choices, ran, checked):
    """Every op of ``checked`` runs as its reference too; the ``choices`` that ops made are kept in order."""

    def shadowed(name, function, check):
        def call(*arguments, impl, **keywords):
            others = list(arguments)
            for place in WRITERS.get(name, ()):
                others[place] = twin(arguments[place])
            got = function(*arguments, impl=impl, **keywords)
            want = function(*others, impl="reference", **keywords)
            if name in WRITERS:
                got, want = ([given[place] for place in WRITERS[name]] for given in (arguments, others))
            check(name, got, want, arguments, keywords)
            if name in CHOICES:
                choices.append(got)
            ran.add(name)
            return got

        return call

    for (module, name), check in checked.items():
        patch.setattr(module, name, shadowed(name, getattr(module, name), check))


def twin(cache):
    """A copy with the same strides, and the bytes between blocks."""
    held = torch.as_strided(cache, (storage_extent(cache),), (1,)).clone()
    return torch.as_strided(held, cache.shape, cache.stride())


def replay(patch, choices, checked):
    """Ops that choose give the ``choices`` of an earlier run, in its order."""
    given = iter(choices)
    for module, name in checked:
        if name in CHOICES:
            patch.setattr(module, name, lambda *_, **__: next(given))


def run(requests, prompts, later):
    """fp32 logits of every position: the prompts in two chunks, then ``later`` token by token, all requests
    together."""
    rows = [[] for _ in prompts]
    steps = [("prefill", [prompt[: len(prompt) * 4 // 7] for prompt in prompts])]
    steps += [("prefill", [prompt[len(prompt) * 4 // 7 :] for prompt in prompts])]
    steps += [("decode", [tokens[i : i + 1] for tokens in later]) for i in range(len(later[0]))]
    for kind, parts in steps:
        for r, logits in enumerate(requests.step(**{kind: list(enumerate(parts))})):
            rows[r].append(logits)
    return torch.cat([torch.cat(some) for some in rows])


def check_layer(spec, device, prompt_lengths, impl="triton", kind="fp8", decode_steps=4, checked=CHECKED, block_size=0):
    """The two runs of this file's first paragraph."""
    assert min(prompt_lengths) > spec.index.top_k
    generator = torch.Generator().manual_seed(1)
    prompts = [torch.randint(spec.vocab_size, (length,), generator=generator) for length in prompt_lengths]
    later = [torch.randint(spec.vocab_size, (decode_steps,), generator=generator) for _ in prompts]
    params, layouts = weights_of(spec, device), pipeline.cache_layouts(spec, kind)
    options = (spec, params, layouts, len(prompts), max(prompt_lengths) + decode_steps)
    block_size = block_size or (64 if spec.index.top_k >= 64 else 8)
    choices, ran = [], set()
    with pytest.MonkeyPatch.context() as patch:
        shadow(patch, choices, ran, checked)
        got = run(Requests(*options, block_size=block_size, impl=impl, logits_bytes=16 << 20), prompts, later)
    dense = isinstance(spec, Spec) and not spec.moe_layers[0]
    assert ran == {name for _, name in checked} - ({"biased_grouped_topk"} if dense else set())
    with pytest.MonkeyPatch.context() as patch:
        replay(patch, choices, checked)
        want = run(Requests(*options, block_size=block_size, impl="reference"), prompts, later)
    assert got.shape == want.shape == (sum(prompt_lengths) + len(prompts) * decode_steps, spec.vocab_size)
    error = (got - want).pow(2).mean(1).sqrt() / want.pow(2).mean(1).sqrt()
    assert (error <= LOGITS).all(), f"logits off by {float(error.max()):.2e} of their root mean square"
    return float(error.max())
