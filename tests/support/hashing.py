"""A model whose logits are a hash of everything a request has written where the plan says: cheap, and wrong at once if a
block, a ring or a position is not the request's own."""

from __future__ import annotations

from dataclasses import replace

import torch

from sparse_attn import Model, Sampling
from sparse_attn.ops.layers.sampling import sample
from sparse_attn.pipeline import cache_layouts
from sparse_attn.spec import CompressedSpec, preset

WINDOW, VOCAB, PRIME = 5, 64, 8191.0


def hashing_model(name: str) -> HashingModel:
    spec = preset(name)
    if isinstance(spec, CompressedSpec):
        spec = replace(spec, num_layers=1, layer_kinds=("indexed",), hash_layers=(False,), window=WINDOW)
    else:
        spec = replace(spec, num_layers=1, moe_layers=spec.moe_layers[:1], index_layers=spec.index_layers[:1])
    spec = replace(spec, vocab_size=VOCAB)
    return HashingModel(spec, {"embed": torch.zeros(1)}, cache_layouts(spec, "fp32"), batch_invariant=True)


def told(entries: list[float], window: list[float]) -> torch.Tensor:
    """fp32 logits [vocab] after tokens with these entries and this window."""
    value = 1.0
    for number in (*entries, *window):
        value = (value * 31 + number + 1) % PRIME
    return torch.sin(torch.arange(VOCAB, dtype=torch.float32) * (value + 1))


class HashingModel(Model):
    """Tokens of a model without rings are entries of ratio 1; with rings an entry is the sum of ``ratio`` tokens, read
    back from the compressor's state."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        del self.forward  # of the class, and no copy of the other one

    @property
    def ratio(self) -> int:
        return self.spec.indexed_ratio if self.has_rings else 1

    def forward(self, tokens, caches, plan):
        logits = torch.full((tokens.shape[0], VOCAB), torch.nan)
        paged = caches.compressed[0] if self.has_rings else caches.kv[0]
        for row, request in enumerate(plan.request_ids.tolist()):
            if request >= 0:
                logits[row] = self._row(int(tokens[row]), caches, paged, plan, request, row)
        return logits

    def _row(self, token, caches, paged, plan, request, row):
        position, slot = int(plan.positions[row]), int(plan.slot_mapping[row])
        assert slot >= 0, "a live row writes nowhere"
        size, ratio = paged.shape[1], self.ratio
        place = lambda entry: (int(plan.block_table[request, entry // size]), entry % size)
        window = []
        if self.has_rings:
            ring = int(plan.ring_table[request, 0])
            state, keys = caches.state[0][ring], caches.kv[0]
            state[position % state.shape[0], 0] = token
            keys.flatten(0, 1)[slot, 0] = token
            if (position + 1) % ratio == 0:
                block, at = place(position // ratio)
                assert block >= 0, "an entry is written nowhere"
                paged[block, at, 0] = sum(
                    float(state[p % state.shape[0], 0]) for p in range(position + 1 - ratio, position + 1)
                )
            seen = range(max(0, position + 1 - WINDOW), position + 1)
            window = [float(keys[ring, p % keys.shape[1], 0]) for p in seen]
        else:
            block, at = place(position)
            assert block * size + at == slot
            paged[block, at, 0] = token
        blocks = [place(entry) for entry in range((position + 1) // ratio)]
        assert all(block >= 0 for block, _ in blocks), "a key lies nowhere"
        return told([float(paged[block, at, 0]) for block, at in blocks], window)


def alone(model: HashingModel, prompt: list[int], most: int, sampling: Sampling) -> list[int]:
    """What a request draws, reckoned without caches."""
    ids, drawn = list(prompt), []
    while len(drawn) < most and not (drawn and drawn[-1] in sampling.stop_ids):
        ratio = model.ratio
        entries = [float(sum(ids[at : at + ratio])) for at in range(0, len(ids) // ratio * ratio, ratio)]
        logits = told(entries, [float(token) for token in ids[-WINDOW:]] if model.has_rings else [])
        seed, position = torch.tensor([sampling.seed]), torch.tensor([len(ids) - 1])
        token = int(sample(logits[None], position, temperature=sampling.temperature, seed=seed))
        drawn.append(token)
        ids.append(token)
    return drawn


def half_right(model: HashingModel, drafts: int):
    """A drafter that knows what greedy rows draw, and says something else at every third place."""

    def drafter(known, seq_lens):
        found = torch.full((len(seq_lens), drafts), -1)
        for row, length in enumerate(seq_lens.tolist()):
            if length:
                right = alone(model, known[row, :length].tolist(), drafts, Sampling())
                found[row] = torch.tensor(
                    [(token + ((length + at) % 3 == 0)) % VOCAB for at, token in enumerate(right)]
                )
        return found

    return drafter
