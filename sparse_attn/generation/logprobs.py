"""Log-probabilities of generated tokens, gathered step by step."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch

from sparse_attn.generation.blocks import Span
from sparse_attn.ops.layers.sampling import token_logprobs
from sparse_attn.types import Logprobs


class TokenLogprobs:
    """Of ``prompts``' continuations, under the model's own softmax: of each token drawn, and of the ``best`` ones."""

    def __init__(self, prompts: Sequence[Sequence[int]], best: int):
        self._lengths, self._best = [len(prompt) for prompt in prompts], best
        self._parts: list[list[Logprobs]] = [[] for _ in prompts]

    def prefilled(self, logits: torch.Tensor, spans: Sequence[Span], tokens: torch.Tensor) -> None:
        """Take the first token of each prompt that ends among ``spans``. logits: of their rows. tokens: of all
        prompts."""
        ends = accumulate(span.stop - span.start for span in spans)
        last = [(end - 1, span.request) for end, span in zip(ends, spans) if span.stop == self._lengths[span.request]]
        if last:
            rows, requests = (torch.tensor(column, dtype=torch.int64, device=logits.device) for column in zip(*last))
            self._take(logits[rows], tokens[requests], [request for _, request in last])

    def stepped(self, logits: torch.Tensor, tokens: torch.Tensor, alive: Sequence[bool]) -> None:
        """Take the tokens of the prompts that were ``alive`` before a decode step."""
        self._take(logits, tokens.to(logits.device), [n if was else None for n, was in enumerate(alive)])

    def _take(self, logits: torch.Tensor, tokens: torch.Tensor, requests: Sequence[int | None]) -> None:
        found = [part.cpu() for part in token_logprobs(logits, tokens, best=self._best)]
        for row, request in enumerate(requests):
            if request is not None:
                self._parts[request].append(Logprobs(*(part[row : row + 1] for part in found)))

    def result(self) -> list[Logprobs]:
        """A row a generated token."""
        return [Logprobs(*map(torch.cat, zip(*parts))) for parts in self._parts]
