"""What FlashMLA's call sites cost over our operators: the adapter (us), and the operator called directly (peer_us)."""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch

from benchmarks.inputs import BLOCK, D_QK, D_V, LATENT_LAYOUT, distinct_rows, filled_cache, normal, packed
from benchmarks.record import Record
from benchmarks.registry import suite
from benchmarks.run import Run
from sparse_attn import roofline
from sparse_attn.integrations.flash_mla import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata
from sparse_attn.ops.attention.sparse import sparse_attn_decode, sparse_attn_prefill

SCALE = D_QK**-0.5


@suite("compat")
def compat(run: Run) -> Iterator[Record]:
    "FlashMLA's decode and prefill through the adapter (us), and the operators called directly (peer_us)."
    stretch, top_k = run.pick((32768, 2048), (256, 128))
    cache = filled_cache(LATENT_LAYOUT, run.pick(64, 2) * stretch // BLOCK, run.device)
    full = [(heads, requests, with_length) for heads in (128, 64) for requests in (1, 8, 32, 64, 128)
            for with_length in (False, True)]  # fmt: skip
    for heads, requests, with_length in run.pick(full, [(4, 3, False), (4, 3, True)]):
        yield _decode(run, cache, stretch, top_k, heads, requests, with_length)
    full = [(128, False, True), (128, True, True), (128, False, False), (64, False, True), (64, True, True)]
    for heads, with_length, with_max in run.pick(full, [(4, False, True), (4, True, True), (4, False, False)]):
        yield _prefill(run, heads, with_length, with_max)


def _decode(run, cache, stretch, top_k, heads, requests, with_length) -> Record:
    sets = run.sets(requests * top_k * LATENT_LAYOUT.row + 2 * requests * heads * (D_QK + D_V))
    q = normal(sets, requests, 1, heads, D_QK, device=run.device)
    owner = torch.arange(sets * requests, device=run.device) % (cache.shape[0] * BLOCK // stretch) * stretch
    slots = distinct_rows(sets * requests, stretch, top_k, run.device) + owner.int().unsqueeze(1)
    slots = slots.view(sets, requests, 1, top_k)
    ragged = [packed(one.flatten(0, 1)) for one in slots]
    length = torch.full((requests,), top_k, dtype=torch.int32, device=run.device) if with_length else None
    plan = get_mla_metadata()[0]

    def adapted(index):
        return flash_mla_with_kvcache(
            q[index], cache.unsqueeze(2), None, None, D_V, plan, softmax_scale=SCALE, is_fp8_kvcache=True,
            indices=slots[index], topk_length=length,
        )  # fmt: skip

    def direct(index):
        return sparse_attn_decode(q[index].flatten(0, 1), cache, ragged[index], scale=SCALE, layout=LATENT_LAYOUT)

    out, lse = adapted(0)
    own = direct(0)
    _check(out.flatten(0, 1), own.out, lse.squeeze(2), own.lse)
    keys = requests * top_k
    read = int(slots[0].unique().numel()) * LATENT_LAYOUT.row
    case = f"decode, heads {heads}, requests {requests}{', lengths' if with_length else ''}"
    floor = run.floor(roofline.attention((requests, heads, D_QK), D_V, keys, read))
    return _compare(run, case, [functools.partial(adapted, at) for at in range(sets)],
                    [functools.partial(direct, at) for at in range(sets)], floor)  # fmt: skip


def _prefill(run, heads, with_length, with_max) -> Record:
    tokens, rows, top_k = run.pick((4096, 32768, 2048), (5, 256, 128))
    q, kv = normal(tokens, heads, D_QK, device=run.device), normal(rows, 1, D_QK, device=run.device)
    indices = distinct_rows(tokens, rows, top_k, run.device)
    length = torch.full((tokens,), top_k, dtype=torch.int32, device=run.device) if with_length else None
    ragged = packed(indices)

    def adapted():
        return flash_mla_sparse_fwd(q, kv, indices.unsqueeze(1), SCALE, topk_length=length, return_max_logits=with_max)

    def direct():
        return sparse_attn_prefill(q, kv, ragged, scale=SCALE, d_v=D_V)

    out, _, lse = adapted()
    _check(out, direct().out, lse, direct().lse)
    work = roofline.attention((tokens, heads, D_QK), D_V, tokens * top_k, rows * D_QK * 2)
    case = f"prefill, heads {heads}{', lengths' if with_length else ''}{'' if with_max else ', no max_logits'}"
    return _compare(run, case, [adapted], [direct], run.floor(work))


def _check(out, own_out, lse, own_lse) -> None:
    torch.testing.assert_close(out, own_out, rtol=0, atol=0)
    torch.testing.assert_close(lse, own_lse, rtol=0, atol=0)


def _compare(run, case, adapted, direct, floor) -> Record:
    return run.compare(case, adapted, "operator", None if run.dry else direct, floor)
