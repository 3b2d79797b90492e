"""What the weights are worth while they train: the training forward on the documents of the quality report."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import accumulate
from typing import TYPE_CHECKING

import torch

from sparse_attn.runtime.documents import Document, retrieval_documents, text_documents

if TYPE_CHECKING:
    from training.loop import Trainer

ROWS = 16  # documents at a time
SEED = 1


@torch.no_grad()
def measure(trainer: Trainer, length: int, documents: int = 32) -> dict[str, dict[str, float]]:
    """By "dense" and "sparse": bits_per_byte over the tails of held-out text, retrieval: share of whole values
    known."""
    weights = trainer.rounded(trainer.dtype)
    found = {}
    for way in ("dense", "sparse"):
        texts = list(_scores(trainer, weights, text_documents(documents, length), way == "sparse"))
        asked = list(_scores(trainer, weights, retrieval_documents(documents, length, SEED), way == "sparse"))
        bits = torch.cat([nll for nll, _ in texts]).mean().item() / math.log(2)
        found[way] = {"bits_per_byte": bits, "retrieval": sum(all(hit) for _, hit in asked) / max(len(asked), 1)}
    return found


def _scores(
    trainer: Trainer, weights: dict, documents: list[Document], sparse: bool
) -> Iterator[tuple[torch.Tensor, list[bool]]]:
    """(nll, which bytes are likeliest) of every scored piece."""
    for first in range(0, len(documents), ROWS):
        some = documents[first : first + ROWS]
        ids = torch.tensor(
            [list(document.text.encode()) for document in some], dtype=torch.int64, device=trainer.device
        )
        logits, targets = trainer.plain(weights, trainer.spec, ids, sparse=sparse).logits[:, :-1], ids[:, 1:]
        nll = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none").cpu()
        hits = (logits.argmax(-1) == targets).cpu()
        for document, losses, hit in zip(some, nll, hits):
            ends = list(accumulate(map(len, document.pieces), initial=0))
            for place in document.scored:
                span = slice(ends[place] - 1, ends[place + 1] - 1)
                yield losses[span], hit[span].tolist()
