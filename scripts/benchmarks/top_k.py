"""Top-k of random fp32 scores, beside the kernel that vLLM takes for the shape (and that was its fastest there)."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from benchmarks.checks import check_top_k
from benchmarks.peers import TOP_K_SCRATCH
from benchmarks.record import Record
from benchmarks.registry import suite
from benchmarks.run import Run
from sparse_attn import roofline
from sparse_attn.ops.topk.select import top_k_per_row

TOP_KS, TINY_TOP_KS = (512, 1024, 2048), (16, 300)
WARM_SETS = 4  # logits were written just before, so they are in the L2 where they fit


@suite("topk_decode")
def topk_decode(run: Run) -> Iterator[Record]:
    "top_k_per_row of few rows, L2-warm: decode."
    full = [(rows, width) for width in (4096, 32768, 131072) for rows in (1, 8, 32, 64, 128)]
    scratch = torch.zeros(TOP_K_SCRATCH, dtype=torch.uint8, device=run.device)
    for rows, width in run.pick(full, [(3, 256), (40, 64)]):
        logits = [torch.randn(rows, width, dtype=torch.float32, device=run.device) for _ in range(WARM_SETS)]
        ends = torch.full((rows,), width, dtype=torch.int32, device=run.device)
        best = _best(logits[0], None, ends, max(run.pick(TOP_KS, TINY_TOP_KS)))
        for k in run.pick(TOP_KS, TINY_TOP_KS):
            ours = [functools.partial(top_k_per_row, one, k, None, ends) for one in logits]
            check_top_k(ours[0](), logits[0], None, best[:, :k])
            theirs = name = None
            if run.peers is not None:
                out = torch.full((rows, k), -1, dtype=torch.int32, device=run.device)
                theirs = [functools.partial(run.peers.top_k_decode, one, ends, out, scratch) for one in logits]
                name = f"vLLM {run.peers.top_k_decode_name(rows)}"
                check_top_k(theirs[0](), logits[0], None, best[:, :k])
            floor = run.floor(roofline.selection(rows * width))
            yield run.compare(f"rows {rows}, width {width}, k {k}", ours, name, theirs, floor, target_ms=15)


@suite("topk_prefill")
def topk_prefill(run: Run) -> Iterator[Record]:
    "top_k_per_row of a prefill chunk's rows, causal ends."
    full = [(rows, width) for rows in (2048, 4096) for width in (8192, 32768, 131072)]
    for rows, width in run.pick(full, [(4, 256)]):
        logits = torch.randn(rows, width, dtype=torch.float32, device=run.device)
        ends = torch.arange(width - rows + 1, width + 1, dtype=torch.int32, device=run.device)
        top_ks = run.pick(TOP_KS, TINY_TOP_KS)
        random = (torch.rand(rows, dtype=torch.float32, device=run.device) * (width // 4)).to(torch.int32)
        for name, starts, some_ks in (("0", torch.zeros_like(ends), top_ks), ("random", random, top_ks[-1:])):
            best = _best(logits, starts, ends, max(some_ks))
            floor = run.floor(roofline.selection(int((ends - starts).sum())))
            for k in some_ks:
                ours = functools.partial(top_k_per_row, logits, k, starts, ends)
                check_top_k(ours(), logits, starts, best[:, :k])
                theirs = None
                if run.peers is not None:
                    out = torch.full((rows, k), -1, dtype=torch.int32, device=run.device)
                    theirs = functools.partial(run.peers.top_k_prefill, logits, starts, ends, out)
                    check_top_k(theirs(), logits, starts, best[:, :k])
                yield run.compare(
                    f"rows {rows}, width {width}, k {k}, starts {name}",
                    [ours],
                    "vLLM top_k_per_row_prefill",
                    theirs and [theirs],
                    floor,
                    target_ms=30,
                )


def _best(logits: torch.Tensor, starts: torch.Tensor | None, ends: torch.Tensor, k: int) -> torch.Tensor:
    """fp32 [rows, k]: the largest values of each range, descending, -inf behind."""
    column = torch.arange(logits.shape[1], device=logits.device)
    inside = column < ends.unsqueeze(1)
    if starts is not None:
        inside &= column >= starts.unsqueeze(1)
    best = torch.where(inside, logits, -torch.inf).topk(min(k, logits.shape[1]), sorted=True).values
    return torch.nn.functional.pad(best, (0, k - best.shape[1]), value=-torch.inf)
