"""Training of a layer of multi-token prediction behind a trained model, whose weights stay as they are.

The layer learns the model's own distributions, which is what drafts are compared with, for the token behind the next
one, and from its own hidden state for the one behind that.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from sparse_attn.checkpoints.save import save
from sparse_attn.models.mtp import PREFIX
from sparse_attn.models.norms import rms_norm
from sparse_attn.models.shapes import prediction_shapes, prediction_spec
from sparse_attn.spec import CompressedSpec, Spec
from training import latent, windowed
from training.batches import Source
from training.parts import Params, Trace, embed

DRAFTS = 2
INDEX_ROWS = 32
COPIED = ("embed", "lm_head")  # of the model, and not trained, as in published checkpoints


class Settings(NamedTuple):
    """steps of rows x length tokens, learning_rate: the highest. retrieval_share: of rows with keys and values."""

    steps: int
    rows: int
    length: int
    learning_rate: float
    retrieval_share: float


def first_weights(params: Params, spec: Spec | CompressedSpec, seed: int) -> Params:
    """The model's last layer and head, and projections that begin with the hidden state alone."""
    home: dict[str, Any] = {"dtype": torch.float32, "device": "cpu"}
    generator, last, weights = torch.Generator().manual_seed(seed), f"layers.{spec.num_layers - 1}.", {}
    for name, shape in prediction_shapes(spec, 1).items():
        kind = name.removeprefix(PREFIX)
        noise = 0.5 * torch.randn(shape, generator=generator, **home) * shape[-1] ** -0.5
        if kind in ("enorm", "hnorm"):
            value = torch.ones(shape, **home)
        elif kind == "eh_proj":
            value = noise + F.pad(torch.eye(shape[0], **home), (shape[0], 0))
        elif kind in ("e_proj", "h_proj"):
            value = noise + (torch.eye(shape[0], **home) if kind == "h_proj" else 0.0)
        else:
            value = params[last + kind if last + kind in params else kind]
        assert tuple(value.shape) == shape
        weights[name] = value.detach().to(params["embed"].device, copy=True)
    return weights


def predict(
    params: Params, spec: Spec | CompressedSpec, tokens: torch.Tensor, hidden: torch.Tensor,
    index_rows: torch.Tensor | None, trace: Trace, *, sparse: bool = False, stable: bool = False,
) -> torch.Tensor:  # fmt: skip
    """models.mtp.predict without caches: tokens [B, L], each position's next one; hidden as forward gives it."""
    one, batch = prediction_spec(spec), tokens.shape[0]
    if isinstance(one, CompressedSpec):
        embedded = rms_norm(embed(tokens.flatten(), params["embed"]), params[PREFIX + "enorm"], spec.rms_eps)
        streams = F.linear(rms_norm(hidden, params[PREFIX + "hnorm"], spec.rms_eps), params[PREFIX + "h_proj"])
        streams = streams + F.linear(embedded, params[PREFIX + "e_proj"]).unsqueeze(1)
        return windowed.decoder_layer(
            streams, tokens.flatten(), params, PREFIX, one, 0, sparse, None, stable, trace, windowed.StreamOps(), batch
        )
    embedded = rms_norm(embed(tokens, params[PREFIX + "embed"]), params[PREFIX + "enorm"], spec.rms_eps)
    both = torch.cat([embedded, rms_norm(hidden, params[PREFIX + "hnorm"], spec.rms_eps)], dim=-1)
    causal = torch.ones(tokens.shape[1], tokens.shape[1], dtype=torch.bool, device=tokens.device).tril()
    out, _ = latent.decoder_layer(
        F.linear(both, params[PREFIX + "eh_proj"]), params, PREFIX, one, 0, causal, None, sparse, index_rows, stable,
        trace,
    )  # fmt: skip
    return rms_norm(out, params[PREFIX + "norm"], spec.rms_eps)


def predicted_logits(params: Params, spec: Spec | CompressedSpec, hidden: torch.Tensor, batch: int) -> torch.Tensor:
    """fp32 [B, L, vocab]."""
    if isinstance(spec, CompressedSpec):
        return windowed.streams_logits(hidden, params, PREFIX, spec).unflatten(0, (batch, -1))
    return F.linear(hidden, params[PREFIX + "lm_head"]).float()


def losses(
    params: Params, spec: Spec | CompressedSpec, tokens: torch.Tensor, index_rows: torch.Tensor
) -> tuple[list[torch.Tensor], list[torch.Tensor], torch.Tensor]:
    """(KL from the model's distribution, share of its likeliest tokens found) of each draft, and the indexer's loss."""
    batch, length = tokens.shape
    forward = windowed.forward if isinstance(spec, CompressedSpec) else latent.forward
    with torch.no_grad():
        out = forward(params, spec, tokens, sparse=False)
    hidden, trace, kl, right = out.hidden, Trace([], {}), [], []
    following = torch.cat([tokens[:, 1:], tokens[:, :1]], dim=1)
    for draft in range(DRAFTS):
        if draft:  # the layer's own hidden state stands in for the model's at the next position
            hidden = hidden.unflatten(0, (batch, length)) if isinstance(spec, CompressedSpec) else hidden
            hidden = torch.cat([hidden[:, :1], hidden[:, :-1]], dim=1)
            hidden = hidden.flatten(0, 1) if isinstance(spec, CompressedSpec) else hidden
        hidden = predict(params, spec, following, hidden, None if draft else index_rows, trace)
        found = predicted_logits(params, spec, hidden, batch)[:, draft : length - 2]
        wanted = out.logits[:, draft + 1 : length - 1]
        kl.append(
            F.kl_div(found.log_softmax(-1), wanted.log_softmax(-1), log_target=True, reduction="none").sum(-1).mean()
        )
        right.append((found.argmax(-1) == wanted.argmax(-1)).float().mean())
    index = torch.stack(trace.index_loss).sum() if trace.index_loss else torch.zeros_like(kl[0])
    return kl, right, index


def train_prediction(
    params: Params, spec: Spec | CompressedSpec, source: Source, settings: Settings, folder: Path, deadline: float,
    *, seed: int, report_every: int,
) -> bool:  # fmt: skip
    """Train the layer until ``deadline`` (of time.monotonic) or the last step, and write the checkpoint with it into
    ``folder``. The learning rate falls by what is left of the time, or of the steps if that is less."""
    weights = {name: value.detach() for name, value in params.items()} | first_weights(params, spec, seed)
    fixed = tuple(PREFIX + kind for kind in COPIED) + tuple(n for n in weights if n.endswith("moe.bias"))
    own = [name for name in weights if name.startswith(PREFIX) and name not in fixed]
    for name in own:
        weights[name].requires_grad_()
    optimiser = torch.optim.AdamW([weights[name] for name in own], betas=(0.9, 0.95), weight_decay=0.0)
    started, totals = time.monotonic(), torch.zeros(2 * DRAFTS + 1, dtype=torch.float32, device=source.device)
    for step in range(1, settings.steps + 1):
        now = time.monotonic()
        left = min(1 - step / settings.steps, (deadline - now) / (deadline - started))
        if left <= 0:
            break
        rate = settings.learning_rate * min(1.0, step / 20) * (0.02 + 0.98 * math.sin(0.5 * math.pi * left) ** 2)
        for group in optimiser.param_groups:
            group["lr"] = rate
        tokens = source.batch(settings.rows, settings.length, settings.retrieval_share).tokens[:, :-1]
        index_rows = torch.randperm(settings.length, generator=source.generator, device=source.device)[:INDEX_ROWS]
        kl, right, index = losses(weights, spec, tokens, index_rows)
        optimiser.zero_grad()
        (sum(kl) + index).backward()
        torch.nn.utils.clip_grad_norm_([weights[name] for name in own], 1.0)
        optimiser.step()
        totals += torch.stack([*kl, *right, index]).detach()
        if step % report_every == 0:
            means = (totals / report_every).tolist()
            totals.zero_()
            shown = "  ".join(
                f"draft {n + 1}: KL {means[n]:.3f}, {100 * means[DRAFTS + n]:.1f}%" for n in range(DRAFTS)
            )
            print(f"step {step:>5}  {time.monotonic() - started:6.1f} s  {shown}  index {means[-1]:.3f}", flush=True)
    size = save(folder, spec, {name: value.detach() for name, value in weights.items()}, torch.bfloat16)
    facts = {"steps": step, "seconds": time.monotonic() - started, "bytes": size, "settings": settings._asdict()}
    (folder / "prediction.json").write_text(json.dumps(facts, indent=2) + "\n")
    print(f"{folder}: {size:,} bytes", flush=True)
    return True
