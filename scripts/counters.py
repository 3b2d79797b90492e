#!/usr/bin/env python
"""Run each of the slow kernels once, for a profiler that counts between cudaProfilerStart and cudaProfilerStop:

ncu --clock-control none --profile-from-start off --csv --page raw --section SpeedOfLight --section WarpStateStats \\
    --section SchedulerStats --section MemoryWorkloadAnalysis --section ComputeWorkloadAnalysis \\
    python scripts/counters.py
"""

from __future__ import annotations

import argparse
import functools
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import torch  # noqa: E402
from benchmarks import windowed  # noqa: E402
from benchmarks.inputs import (  # noqa: E402
    BLOCK,
    D_V,
    INDEX_LAYOUT,
    LATENT_LAYOUT,
    decode_index,
    distinct_rows,
    filled_cache,
    normal,
    packed,
    prefill_index,
)
from benchmarks.run import Run  # noqa: E402

from sparse_attn.ops.attention.sparse import sparse_attn_decode, sparse_attn_prefill  # noqa: E402
from sparse_attn.ops.indexer.scores import fp8_mqa_logits, fp8_paged_mqa_logits  # noqa: E402
from sparse_attn.ops.topk.select import top_k_per_row  # noqa: E402

Call = tuple[str, Callable[[], object]]


def calls(run: Run) -> Iterator[Call]:
    yield from _decode(run)
    yield from _prefill(run)
    yield from _scores(run)
    for rows, width in run.pick([(4096, 32768), (64, 131072), (64, 32768)], [(3, 256)]):
        logits = torch.randn(rows, width, dtype=torch.float32, device=run.device)
        yield f"top-k of {rows} x {width}", functools.partial(top_k_per_row, logits, run.pick(2048, 16))


def _decode(run: Run) -> Iterator[Call]:
    full = [(LATENT_LAYOUT, heads, 2048) for heads in (128, 64, 16)] + [
        (windowed.LAYOUT, 128, 1152),
        (windowed.LAYOUT, 64, 640),
    ]
    requests, slots = run.pick((64, 1 << 18), (3, 256))
    for layout, heads, top_k in run.pick(full, [(LATENT_LAYOUT, 4, 64), (windowed.LAYOUT, 4, 64)]):
        cache = filled_cache(layout, slots // BLOCK, run.device)
        q = normal(requests, heads, layout.dim, device=run.device)
        rows = packed(distinct_rows(requests, slots, top_k, run.device))
        call = functools.partial(sparse_attn_decode, q, cache, rows, scale=layout.dim**-0.5, layout=layout)
        yield f"decode, {layout.name}, {heads} heads, top-k {top_k}", call


def _prefill(run: Run) -> Iterator[Call]:
    full = [(576, 128, 2048), (512, 128, 1152), (512, 64, 640), (576, 16, 2048)]
    tokens, keys = run.pick((2048, 32768), (3, 256))
    for dim, heads, top_k in run.pick(full, [(576, 4, 64)]):
        q, kv = normal(tokens, heads, dim, device=run.device), normal(keys, dim, device=run.device)
        rows = packed(distinct_rows(tokens, keys, top_k, run.device))
        call = functools.partial(sparse_attn_prefill, q, kv, rows, scale=dim**-0.5, d_v=D_V)
        yield f"prefill, d {dim}, {heads} heads, top-k {top_k}", call


def _scores(run: Run) -> Iterator[Call]:
    tokens, context, requests, heads = run.pick((4096, 32768, 64, 64), (3, 256, 2, 4))
    inputs = prefill_index(tokens, context, heads, run.device)
    yield f"scores of {tokens} x {context}", functools.partial(fp8_mqa_logits, *inputs)
    cache = filled_cache(INDEX_LAYOUT, requests * context // BLOCK, run.device)
    for next_n in (1, 2):
        step = decode_index(1, requests, next_n, context, cache.shape[0], heads, run.device)
        arguments = (step.q[0], cache, step.weights[0], step.context_lens, step.tables[0], context, INDEX_LAYOUT)
        yield f"paged scores of {requests} x {next_n} x {context}", functools.partial(fp8_paged_mqa_logits, *arguments)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="tiny inputs on the CPU: do the calls run?")
    options = parser.parse_args()
    if not options.dry and not torch.cuda.is_available():
        parser.error("no GPU here (--dry: only run through the calls)")
    for name, call in calls(Run("cpu", dry=True) if options.dry else Run()):
        print(name, flush=True)
        call()  # compiles
        if not options.dry:
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStart()
            call()
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStop()
    return 0


if __name__ == "__main__":
    sys.exit(main())
