"""Oracles of FlashMLA's and DeepGEMM's conventions in float64.

They read and write caches byte by byte, as the field's formats are described, and know nothing of our layouts.
"""

from __future__ import annotations

import math

import torch

from sparse_attn.testing.compare import DECODE_OUT, similarity_difference

INF = math.inf


def fp8(*shape):
    return torch.randn(shape).to(torch.float8_e4m3fn)


def latent_bytes(slot_values):
    """656-byte records of float rows [n, 576], and the values they stand for, in float64."""
    records, values = [], []
    for row in slot_values:
        groups, scales, meant = [], [], []
        for part in row[:512].view(4, 128):
            scale = part.abs().max() / 448
            codes = (part / scale).to(torch.float8_e4m3fn)
            groups.append(codes.view(torch.uint8))
            scales.append(scale.view(1).view(torch.uint8))
            meant.append((codes.float() * scale).bfloat16().double())  # readers multiply in q's dtype
        rope = row[512:].bfloat16()
        records.append(torch.cat(groups + scales + [rope.view(torch.uint8)]))
        values.append(torch.cat([*meant, rope.double()]))
    return torch.stack(records), torch.stack(values)


def planar_blocks(values, block_size):
    """584-byte records, planar: ([blocks, block_size, 1, 584] with blocks a multiple of 576 bytes apart, meant)."""
    blocks = len(values) // block_size
    stride = -(-block_size * 584 // 576) * 576
    memory = torch.full((blocks, stride), 0xFF, dtype=torch.uint8)
    meant = torch.empty(len(values), 512, dtype=torch.float64)
    for slot, row in enumerate(values.bfloat16()):
        block, offset = divmod(slot, block_size)
        for group, part in enumerate(row[:448].float().view(7, 64)):
            exponent = math.ceil(math.log2(max(float(part.abs().max()), 1e-4) / 448))
            codes = (part * 2.0**-exponent).to(torch.float8_e4m3fn)
            at = offset * 576 + 64 * group
            memory[block, at : at + 64] = codes.view(torch.uint8)
            memory[block, block_size * 576 + offset * 8 + group] = exponent + 127
            meant[slot, 64 * group : 64 * group + 64] = codes.double() * 2.0**exponent
        memory[block, offset * 576 + 448 : offset * 576 + 576] = row[448:].view(torch.uint8)
        meant[slot, 448:] = row[448:].double()
    return memory.as_strided((blocks, block_size, 1, 584), (stride, 584, 584, 1)), meant


def attention(q, pairs, scale, d_v, sink=None):
    """(out, max_logits, lse, mass) of float64 rows, q [tokens, heads, d]; pairs: (values [rows, d], a list of ids a token).

    ``mass`` is ``out`` with every value's magnitude in its place: what a rounding of the probabilities is a share of.
    """
    tokens, heads, _ = q.shape
    out, mass = torch.zeros(2, tokens, heads, d_v, dtype=torch.float64)
    largest = torch.full((tokens, heads), -INF, dtype=torch.float64)
    lse = torch.full((tokens, heads), INF, dtype=torch.float64)
    for t in range(tokens):
        keys = torch.cat([values[[i for i in ids[t] if 0 <= i < len(values)]] for values, ids in pairs])
        if not len(keys):
            continue
        z = q[t].double() @ keys.double().T * scale
        largest[t], lse[t] = z.amax(1), z.logsumexp(1)
        gate = 1.0 if sink is None else torch.sigmoid(lse[t] - sink.double()[:heads]).unsqueeze(1)
        weights, v = gate * z.softmax(1), keys[:, :d_v].double()
        out[t], mass[t] = weights @ v, weights @ v.abs()
    return out, largest, lse, mass


def first(indices, lengths):
    """The ids that count: indices [tokens, width], lengths a token or None."""
    every = indices.tolist()
    return [row if lengths is None else row[: max(0, int(n))] for row, n in zip(every, lengths or [0] * len(every))]


def close(got, expected):
    torch.testing.assert_close(got.double(), expected[0], rtol=2e-2, atol=2e-3)


def within_rounding(got, expected):
    """Kernels round probabilities and output to bf16 once each (2**-8 of a number at most); 2% for fp32 sums and exp2."""
    out, *_, mass = expected
    assert got.shape == out.shape and got.dtype == torch.bfloat16
    bound = 1.02 * 2**-7 * mass + 1e-6
    worst = ((got.double() - out).abs() / bound).max()
    assert worst <= 1, f"worst error {worst:.3f} of its bound"
    assert similarity_difference(got, out) <= DECODE_OUT[-1]


def close_scores(got, expected):
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-5)
