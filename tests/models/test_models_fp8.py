"""Models with fp8 caches, held against what the quantisation itself allows.

e4m3 keeps three mantissa bits: rounding moves a value by at most EPSILON = 2**-4 of itself, or, below the smallest
normal, by at most half a subnormal step, 2**-10 of the scale. From that:

- a score w . relu(q . k) computed from quantised q and k is within ((1 + EPSILON)**2 - 1) * |w| . (|q| . |k|), plus the
  subnormal part, of the exact one; so no key may be left out whose exact score exceeds that of a chosen key by more
  than the sum of their two bounds;
- apart from the quantisation nothing may differ: transformers with its index queries, index keys and latents
  quantised and dequantised in place must give the same logits. A value within fp32 rounding (1e-6, say) of the midpoint
  between two codes, EPSILON apart, may round either way and then moves the logits of the rows that see it; a row has
  about 200 quantised values per layer, so some 200 * 3 * 2e-6 / EPSILON = 2% of rows are hit. One in twenty may be off;
- against unquantised transformers, in rows that see no more than top-k keys, so that no set can change: each layer
  perturbs what its attention adds by at most EPSILON through the values and about as much through the scores, with
  errors of random sign: the logits stay within 2 * EPSILON * layers of their root mean square, in root mean square. In
  later rows a swapped key changes an attention sum by a whole term, which no multiple of EPSILON bounds; the two tests
  above hold those.
"""

import pytest
import torch
from support.parity import CONFIGS, TOLERANCE, ours, run, stable_topk, theirs
from support.requests import Requests

from sparse_attn import pipeline
from sparse_attn.fp8 import fp8_decode, fp8_quantise
from sparse_attn.layout import INDEX_AMAX_FLOOR, LatentFp8Layout
from sparse_attn.models import mla

EPSILON = 2.0**-4
NAMES = ("v32", "glm shared")


def through_fp8(x, rule, floor):
    codes, scales = fp8_quantise(x, "e4m3fn", rule, floor)
    return fp8_decode(codes, "e4m3fn") * scales.unsqueeze(-1)


def simulate(patch, module, prefix, interleaved):
    """Let transformers' indexer and latents go through fp8 and back."""
    attention, indexer = getattr(module, prefix + "Attention"), getattr(module, prefix + "Indexer")
    expand = attention.expand_kv
    rotate = module.apply_rotary_pos_emb_interleave if interleaved else module.apply_rotary_pos_emb

    def expand_kv(self, latent, rope):
        return expand(self, through_fp8(latent, "raw", LatentFp8Layout(4, 0, 4).amax_floor), rope.bfloat16().float())

    def index(self, hidden, q_resid, position_embeddings, mask, position_ids, past_key_values=None, cache=None):
        cache = past_key_values if cache is None else cache  # by the names of transformers before and since 5.24
        rope = self.qk_rope_head_dim
        q = self.wq_b(q_resid).unflatten(-1, (self.n_heads, self.head_dim))
        k = self.k_norm(self.wk(hidden)).unsqueeze(2)
        rotated = rotate(q[..., :rope], k[..., :rope], *position_embeddings, unsqueeze_dim=2)
        whole = (torch.cat([front, x[..., rope:]], -1) for front, x in zip(rotated, (q, k)))
        q, k = (through_fp8(x, "pow2", INDEX_AMAX_FLOOR) for x in whole)
        k = cache.update_indexer(k.squeeze(2), self.layer_idx)
        scores = torch.einsum("bshd,btd->bsht", q, k).relu() * self.softmax_scale
        scores = torch.einsum("bsht,bsh->bst", scores, self.weights_proj(hidden) * self.n_heads**-0.5) + mask
        return scores.topk(min(self.index_topk, scores.shape[-1])).indices.int()

    patch.setattr(attention, "expand_kv", expand_kv)
    patch.setattr(indexer, "forward", index)


@pytest.mark.parametrize("name", NAMES)
def test_logits_equal_simulated_quantisation(name):
    import transformers.models.deepseek_v32.modeling_deepseek_v32 as v32
    import transformers.models.glm_moe_dsa.modeling_glm_moe_dsa as glm

    kinds = {"v32": (v32, "DeepseekV32", False), "glm": (glm, "GlmMoeDsa", True)}
    module, prefix, interleaved = kinds[CONFIGS[name][0]]
    folder, results = theirs(name)
    model = getattr(module, prefix + "ForCausalLM").from_pretrained(folder, attn_implementation="eager")
    logits = run(name, None, kind="fp8")
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(torch.Tensor, "topk", stable_topk)
        simulate(patch, module, prefix, interleaved)
        wanted = [model(tokens[None], use_cache=True).logits[0] for tokens, _ in results]
    off = torch.cat([((torch.cat(got) - want).abs().amax(-1) > TOLERANCE) for got, want in zip(logits, wanted)])
    assert off.float().mean() <= 0.05


@pytest.mark.parametrize("name", NAMES)
def test_logits_stay_near_unquantised(name):
    spec, _ = ours(name)
    rows = slice(0, spec.index.top_k)
    got = torch.cat([torch.cat(parts)[rows] for parts in run(name, 16, kind="fp8")])
    want = torch.cat([logits[rows] for _, logits in theirs(name)[1]])
    error = (got - want).pow(2).mean().sqrt() / want.pow(2).mean().sqrt()
    assert error < 2 * EPSILON * spec.num_layers


@pytest.mark.parametrize("name", NAMES)
def test_selected_sets_within_the_score_bound(name, monkeypatch):
    """First layer, where both kinds of cache see the same inputs."""
    spec, params = ours(name)
    tokens = theirs(name)[1][0][0]
    seen = []
    exact_query = mla.indexer_q_rope_quant
    select = pipeline.index_select

    def watch_query(*args, layout, **kwargs):
        seen.append(exact_query(*args, layout=pipeline.cache_layouts(spec, "fp32").index, **kwargs))
        return exact_query(*args, layout=layout, **kwargs)

    def watch_keys(keys, *args, **kwargs):
        seen.append(keys)
        return write(keys, *args, **kwargs)

    def watch_selection(*args, **kwargs):
        seen.append(select(*args, **kwargs))
        return seen[-1]

    write = pipeline.write_index_keys
    monkeypatch.setattr(mla, "indexer_q_rope_quant", watch_query)
    monkeypatch.setattr(pipeline, "write_index_keys", watch_keys)
    monkeypatch.setattr(pipeline, "index_select", watch_selection)
    requests = Requests(spec, params, pipeline.cache_layouts(spec, "fp8"), 1, len(tokens))
    requests.step(prefill=[(0, tokens)])
    keys, (query, weights), selection = seen[:3]
    scores = torch.einsum("thd,sd->ths", query, keys)
    exact = torch.einsum("ths,th->ts", scores.relu(), weights)
    # A pow2 scale is below 2 * amax / 448, so half a subnormal step is below amax * 2**-10 * 2 / 448.
    step = 2.0**-9 / 448
    bound_q = query.abs() + step * query.abs().amax(-1, keepdim=True)
    bound_k = keys.abs() + step * keys.abs().amax(-1, keepdim=True)
    bound = torch.einsum("thd,sd->ths", bound_q, bound_k) * ((1 + EPSILON) ** 2 - 1)
    bound = torch.einsum("ths,th->ts", bound, weights.abs()) * (1 + 1e-5)
    indices, indptr = selection.prefill
    changed = 0
    for row in range(len(tokens)):
        chosen = torch.zeros(row + 1, dtype=torch.bool)
        chosen[indices[indptr[row] : indptr[row + 1]].long()] = True
        assert chosen.sum() == min(row + 1, spec.index.top_k)
        if chosen.all():
            continue
        high, low = (exact + bound)[row, : row + 1], (exact - bound)[row, : row + 1]
        assert high[chosen].min() >= low[~chosen].max()
        best = torch.sort(exact[row, : row + 1], descending=True, stable=True).indices[: spec.index.top_k]
        changed += int((~chosen[best]).sum())
    # Quantisation swaps few keys: the bound above is no licence to choose at will.
    assert changed < 0.2 * spec.index.top_k * len(tokens)
