"""What the weights are worth while they train: the training forward on the documents of the quality report."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from itertools import accumulate

import torch

from sparse_attn.cli.documents import Document, retrieval_documents, text_documents

# (token ids, whether attention is sparse) -> logits
Forward = Callable[[torch.Tensor, bool], torch.Tensor]
ROWS = 16  # documents at a time
SEED = 1


@torch.no_grad()
def measure(forward: Forward, device: torch.device, length: int, documents: int) -> dict[str, dict[str, float]]:
    """By "dense" and "sparse": bits_per_byte over the tails of held-out text, retrieval: share of whole values
    known."""
    found = {}
    for way in ("dense", "sparse"):
        texts = list(_scores(forward, device, text_documents(documents, length), way == "sparse"))
        asked = list(_scores(forward, device, retrieval_documents(documents, length, SEED), way == "sparse"))
        bits = torch.cat([nll for nll, _ in texts]).mean().item() / math.log(2)
        found[way] = {"bits_per_byte": bits, "retrieval": sum(all(hit) for _, hit in asked) / max(len(asked), 1)}
    return found


def _scores(
    forward: Forward, device: torch.device, documents: list[Document], sparse: bool
) -> Iterator[tuple[torch.Tensor, list[bool]]]:
    """(nll, which bytes are likeliest) of every scored piece."""
    for first in range(0, len(documents), ROWS):
        some = documents[first : first + ROWS]
        ids = torch.tensor([list(document.text.encode()) for document in some], dtype=torch.int64, device=device)
        logits, targets = forward(ids, sparse)[:, :-1], ids[:, 1:]
        nll = torch.nn.functional.cross_entropy(logits.transpose(1, 2), targets, reduction="none").cpu()
        hits = (logits.argmax(-1) == targets).cpu()
        for document, losses, hit in zip(some, nll, hits):
            ends = list(accumulate(map(len, document.pieces), initial=0))
            for place in document.scored:
                span = slice(ends[place] - 1, ends[place + 1] - 1)
                yield losses[span], hit[span].tolist()
