"""Every operator on seeded inputs, for tests of repeatability: (device) -> a function that gives its output tensors.

Rows are independent of each other, so ``permuted`` inputs must give permuted outputs, bit for bit. Run as a program it
prints a digest of every operator's output.
"""

from __future__ import annotations

import hashlib
import sys

import torch

import sparse_attn as sa
from sparse_attn.ops.layers.hyper_connection import hyper_head, hyper_merge, hyper_mix
from sparse_attn.ops.layers.router import biased_grouped_topk

ROWS, CONTEXT, HEADS = 12, 900, 16


def inputs(device):
    generator = torch.Generator().manual_seed(11)

    def draw(*shape, dtype=torch.bfloat16):
        return torch.randn(shape, generator=generator).to(device, dtype)

    def whole(high, *shape):
        return torch.randint(0, high, shape, generator=generator, dtype=torch.int32).to(device)

    return draw, whole


def filled(layout, draw, blocks, block_size, device):
    cache = sa.allocate_cache(layout, blocks, block_size, device)
    values = draw(blocks * block_size, layout.dim, dtype=torch.float32)
    layout.encode(cache, torch.arange(blocks * block_size, device=device), values)
    return cache


def operators(device):
    """Name -> (function of a row order, how many of its outputs have a row per row)."""
    draw, whole = inputs(device)
    latent, planar, index = sa.LatentFp8Layout(512, 64), sa.PlanarFp8Layout(448, 64), sa.IndexFp8Layout(128)
    latents, planars, keys = (filled(layout, draw, 15, 64, device) for layout in (latent, planar, index))
    q576, q512 = draw(ROWS, HEADS, 576), draw(ROWS, HEADS, 512)
    kv, sink = draw(CONTEXT, 576), draw(HEADS, dtype=torch.float32)
    dense, more = whole(960, ROWS, 320), whole(960, ROWS, 128)
    q_index, weights = draw(ROWS, 64, 128), draw(ROWS, 64, dtype=torch.float32)
    table = torch.arange(15, dtype=torch.int32, device=device).expand(ROWS, 15).contiguous()
    lens = (whole(CONTEXT, ROWS, 1) + 1).contiguous()
    plateaus = whole(5, ROWS, 5000).float()
    logits, bias = draw(ROWS, 256), draw(256, dtype=torch.float32)
    streams, out = draw(ROWS, 4, 512), draw(ROWS, 512)
    fn, base, scale = (
        draw(24, 2048, dtype=torch.float32) * 0.02,
        draw(24, dtype=torch.float32),
        draw(3, dtype=torch.float32),
    )
    post, mixing = torch.sigmoid(logits[:, :4].float()), torch.sigmoid(logits[:, :16].float()).view(-1, 4, 4)
    options = dict(iterations=20, eps=1e-6, norm_eps=1e-6)
    rope = sa.rope_table(1024, 64, 1e4, device=device)
    query = sa.indexer_q_rope_quant(
        q_index, weights, lens.flatten(), rope, start=0, interleaved=True, weight_scale=0.1, layout=index
    )

    def padded(rows, width):
        """Ragged rows -> a matrix, -1 behind each."""
        place = rows.indptr[:-1, None] + torch.arange(width, device=device)
        return torch.where(place < rows.indptr[1:, None], rows.indices[place.clamp_max(rows.indices.numel() - 1)], -1)

    def ragged(rows, order):
        return sa.build_ragged_indices_from_dense(rows[order])

    return {
        "sparse_attn_prefill": lambda o: sa.sparse_attn_prefill(
            q576[o], kv, ragged(dense, o), scale=0.04, d_v=512, sink=sink
        ),
        "sparse_attn_decode": lambda o: sa.sparse_attn_decode(
            q576[o], latents, ragged(dense, o), scale=0.04, layout=latent, sink=sink
        ),
        "sparse_attn_decode, two caches": lambda o: sa.sparse_attn_decode(
            q512[o], planars, ragged(more, o), scale=0.04, layout=planar, extra_cache=planars,
            extra_ragged=ragged(dense, o), extra_layout=planar, sink=sink,
        ),
        "fp8_paged_mqa_logits": lambda o: (sa.fp8_paged_mqa_logits(
            query.query[o].unsqueeze(1), keys, query.weights[o], lens[o], table[o], 960, index
        ),),
        "index_topk_decode": lambda o: (sa.index_topk_decode(
            query.query[o].unsqueeze(1), query.weights[o], keys, lens[o], table[o], 64, 960, index
        ),),
        "index_topk_decode_slots": lambda o: (padded(sa.index_topk_decode_slots(
            query.query[o].unsqueeze(1), query.weights[o], keys, lens[o], table[o], 64, 960, index
        ), 64),),
        "top_k_per_row": lambda o: (sa.top_k_per_row(plateaus[o], 700, None, None),),
        "biased_grouped_topk": lambda o: biased_grouped_topk(logits[o], bias, top_k=8, num_groups=8, top_groups=4),
        "indexer_q_rope_quant": lambda o: sa.indexer_q_rope_quant(
            q_index[o], weights[o], lens[o].flatten(), rope, start=0, interleaved=True, weight_scale=0.1, layout=index
        ),
        "hyper_mix": lambda o: hyper_mix(streams[o], fn, base, scale, **options)[:1],
        "hyper_head": lambda o: (hyper_head(
            streams[o], fn[:4], base[:4], scale[:1], eps=1e-6, norm_eps=1e-6
        ),),
        "hyper_merge": lambda o: (hyper_merge(out[o], streams[o], post[o], mixing[o]),),
    }  # fmt: skip


def digest(outputs) -> str:
    return hashlib.sha256(
        b"".join(x.contiguous().view(torch.uint8).cpu().numpy().tobytes() for x in outputs)
    ).hexdigest()


if __name__ == "__main__":
    order = torch.arange(ROWS)
    for name, function in operators(sys.argv[1]).items():
        print(name, digest(function(order)), sep="\t")
