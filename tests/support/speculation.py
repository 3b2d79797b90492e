"""Drafters that know the answer, know nothing, and know some of it."""

from dataclasses import replace

import torch
from support.steps import small

from sparse_attn import Model, Sampling
from sparse_attn.models.params import random_params
from sparse_attn.pipeline import cache_layouts

SAMPLINGS = {
    "greedy": Sampling(),
    "sampled": Sampling(temperature=1.5, seed=3),
    "filtered and penalised": Sampling(
        temperature=1.2, seed=5, top_k=40, top_p=0.9, min_p=0.01, repetition=1.3, presence=0.5, frequency=0.4
    ),
}


def perfect(prompts, tokens, drafts):
    """Drafts what the model goes on to draw."""
    width = max(len(p) + len(t) for p, t in zip(prompts, tokens)) + drafts + 1
    whole = torch.full((len(prompts), width), -1)
    for row, (prompt, own) in enumerate(zip(prompts, tokens)):
        whole[row, : len(prompt) + len(own)] = torch.tensor([*prompt, *own])

    def drafter(known, seq_lens):
        at = seq_lens.long().unsqueeze(1) + torch.arange(drafts)
        for row, length in enumerate(seq_lens.tolist()):
            if length:
                assert known[row, :length].tolist() == whole[row, :length].tolist()
        return whole.gather(1, at)

    return drafter


def wild(prompts, tokens, drafts):
    """Ids that no vocabulary has."""
    ids = torch.tensor([-1, -(2**63), 2**63 - 1, 2**31])[:drafts]
    return lambda known, seq_lens: ids.repeat(len(seq_lens), 1)


def drafted(prompts, tokens, drafts):
    """Right for a while, then wrong, at places that differ by row and step."""
    right = perfect(prompts, tokens, drafts)
    generator = torch.Generator().manual_seed(drafts)

    def drafter(known, seq_lens):
        found = right(known, seq_lens)
        wrong = torch.rand(found.shape, generator=generator) < 0.4
        return torch.where(wrong & (found >= 0), (found + 1) % 256, found)

    return drafter


def last_ones(known, seq_lens):
    """Drafts the last two ids again, on any device."""
    back = torch.arange(2, 0, -1, device=known.device)
    return known.gather(1, (seq_lens.long().unsqueeze(1) - back).clamp_min(0))


KINDS = {"perfect": perfect, "wild": wild, "drafted": drafted}


def predicting_model(name, vocab_size=257, cache="fp32", device="cpu", **options):
    """With a layer of multi-token prediction. Few tokens are drafted right by chance."""
    spec = replace(small(name, 3), vocab_size=vocab_size, eos_token_ids=())
    params = random_params(spec, seed=1, device=device, mtp=True)
    return Model(spec, params, cache_layouts(spec, cache), **options)
