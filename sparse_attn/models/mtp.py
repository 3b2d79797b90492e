"""The layer of multi-token prediction: what the model draws next, guessed from its hidden state and the token it drew.

Position p of the layer takes the model's hidden state at p and the token at p + 1, and predicts the token at p + 2. It
is a layer of the model with caches of its own (shapes.prediction_spec), under the block table and the rings of the
others. What it returns may take the place of the model's hidden state, to predict one token more.

Formulas: DeepSeek-V3's report (arXiv 2412.19437), section 2.2, in the form that V3.2 and GLM-5 publish (one projection
of both, embedding and head of its own); MTPBlock of DeepSeek-V4's published inference code (a projection each, one for
every stream, the model's embedding and head).
"""

from __future__ import annotations

from typing import Any

import torch

from sparse_attn.framework.autocast import no_autocast
from sparse_attn.mesh import ONE_RANK, Mesh
from sparse_attn.models import deepseek_v4, deepseek_v32
from sparse_attn.models.checks import check_caches, check_params, check_tokens
from sparse_attn.models.norms import rms_norm
from sparse_attn.models.products import product
from sparse_attn.models.step import ModelStep, options_of
from sparse_attn.models.vocabulary import embedding, token_logits
from sparse_attn.pipeline import CacheLayouts, windowed
from sparse_attn.pipeline.options import Options
from sparse_attn.pipeline.parallel.context import own_plan
from sparse_attn.spec import CompressedSpec, Spec
from sparse_attn.types import Caches, StepPlan, WindowCaches

PREFIX = "mtp.0."
Params = dict[str, Any]  # tensors; a Weight where product() takes it


@no_autocast
def predict(
    params: Params,
    spec: Spec | CompressedSpec,
    tokens: torch.Tensor,
    hidden: torch.Tensor,
    caches: Caches | WindowCaches,
    plan: StepPlan,
    layouts: CacheLayouts,
    options: Options,
    *,
    mesh: Mesh = ONE_RANK,
) -> torch.Tensor:
    """The layer's hidden states, of the shape of ``hidden``; the step's keys are written into ``caches``.

    params: of the model, with those of models.shapes.prediction_shapes. spec: what prediction_spec gives. tokens: int64
    or int32 [T], each row's next one. hidden: [T, D], or [T, streams, D] for DeepSeek-V4: what the forward gives with
    keep_hidden, or this function. caches: of this layer alone. plan: of the rows that ``hidden`` belongs to. options:
    of the model. mesh: as the forward takes it.
    """
    check_params(params, spec, predicts=True)
    check_tokens(tokens, plan)
    options = options_of(plan, options)
    if isinstance(spec, CompressedSpec):
        assert isinstance(caches, WindowCaches)
        check_caches("caches.kv", caches.kv, [True])
        windowed.rings_of(plan)
        embedded = rms_norm(embedding(tokens, params["embed"], mesh=mesh), params[PREFIX + "enorm"], spec.rms_eps)
        normed = rms_norm(hidden, params[PREFIX + "hnorm"], spec.rms_eps)
        streams = product(normed.flatten(0, 1), params[PREFIX + "h_proj"], options)
        streams = torch.unflatten(streams, 0, normed.shape[:2])
        streams = streams + product(embedded, params[PREFIX + "e_proj"], options).unsqueeze(1)
        step = ModelStep(plan, layouts, options, mesh)
        windows, shared = deepseek_v4.step_windows(spec, caches, step)
        return deepseek_v4.decoder_layer(streams, tokens, params, PREFIX, spec, 0, caches, step, windows, shared)
    assert isinstance(caches, Caches)
    check_caches("caches.kv", caches.kv, [True])
    check_caches("caches.index", caches.index, [True])
    step = ModelStep(own_plan(plan, mesh.context, block_size=caches.kv[0].shape[1]), layouts, options, mesh)
    embedded = embedding(tokens, params[PREFIX + "embed"], mesh=mesh)
    both = torch.cat(
        [
            rms_norm(embedded, params[PREFIX + "enorm"], spec.rms_eps),
            rms_norm(hidden, params[PREFIX + "hnorm"], spec.rms_eps),
        ],
        dim=-1,
    )
    hidden = product(both, params[PREFIX + "eh_proj"], options)
    out, _ = deepseek_v32.decoder_layer(hidden, params, PREFIX, spec, 0, caches, None, step)
    return rms_norm(out, params[PREFIX + "norm"], spec.rms_eps)


@no_autocast
def predicted_logits(
    params: Params, spec: Spec | CompressedSpec, hidden: torch.Tensor, options: Options, *, mesh: Mesh = ONE_RANK
) -> torch.Tensor:
    """fp32 logits [T, vocab] of what ``predict`` returns, for the token behind the one it was given."""
    if isinstance(spec, CompressedSpec):
        return deepseek_v4.streams_logits(hidden, params, PREFIX, spec, options, mesh=mesh)
    return token_logits(hidden, params[PREFIX + "lm_head"], spec.vocab_size, options, mesh=mesh)
