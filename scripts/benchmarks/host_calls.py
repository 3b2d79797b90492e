"""What an eager call costs the host."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from benchmarks.decode import SCALE
from benchmarks.inputs import LATENT_LAYOUT, distinct_rows, filled_cache, normal, packed
from benchmarks.record import Record
from benchmarks.registry import suite
from benchmarks.run import Run
from sparse_attn.ops.attention.sparse import sparse_attn_decode

CALLS, ROUNDS = 1000, 7


@suite("host_calls")
@torch.no_grad()
def host_calls(run: Run) -> Iterator[Record]:
    "Enqueueing 1,000 eager calls of sparse_attn_decode, by call; the peer is the raw operator of torch.ops."
    cache = filled_cache(LATENT_LAYOUT, 16, run.device)
    ragged = packed(distinct_rows(1, 512, 64, run.device))
    q = normal(1, 64, LATENT_LAYOUT.dim, device=run.device)
    raw, name = torch.ops.sparse_attn.sparse_attn_decode.default, LATENT_LAYOUT.name
    given = (q, cache, *ragged, SCALE, name, None, None, None, "", None, False, "auto")
    public = lambda: sparse_attn_decode(q, cache, ragged, scale=SCALE, layout=LATENT_LAYOUT)  # noqa: E731
    torch.testing.assert_close(public().out, raw(*given)[0], rtol=0, atol=0)
    times = [(enqueue_us(run, public), enqueue_us(run, lambda: raw(*given))) for _ in range(run.pick(ROUNDS, 1))]
    ours, theirs = map(min, zip(*times))  # of rounds side by side, the quietest
    yield Record("sparse_attn_decode", ours, "torch.ops", theirs)


def enqueue_us(run: Run, call: Callable[[], object]) -> float:
    """Microseconds of the host a call, the device idle before."""
    calls = run.pick(CALLS, 2)
    if not run.dry:
        torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(calls):
        call()
    return 1e6 * (time.perf_counter() - begin) / calls
