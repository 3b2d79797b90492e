"""vLLM 0.33's Marlin MoE of MXFP4 weights, called as its fused_marlin_moe does: the only part of vLLM it needs is
vllm/_moe_C_stable_libtorch and vllm/_C_stable_libtorch under PEERS_DIR. An older vLLM has neither operator.

The library holds PTX of compute_80 for sm_90, which the driver compiles at the first call; nothing is timed before.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import torch

LIBRARIES = ("_moe_C_stable_libtorch", "_C_stable_libtorch")
E2M1_ID = 2 | 1 << 8 | 1 << 16  # vLLM's ScalarType: exponent 8 bits, mantissa 8, signed 1; bias and NaN are 0
E2M1_ID |= 1 << 49  # finite values only


class Weights(NamedTuple):
    """Of all experts, in Marlin's order. words: int32; scales: e8m0."""

    words: torch.Tensor
    scales: torch.Tensor


def load(root: Path | None) -> bool:
    """Whether the operators are there."""
    if root is None or not all((root / "vllm" / f"{name}.abi3.so").is_file() for name in LIBRARIES):
        return False
    for name in LIBRARIES:
        torch.ops.load_library(str(root / "vllm" / f"{name}.abi3.so"))
    return hasattr(torch.ops._moe_C, "moe_wna16_marlin_gemm")


def repacked(codes: torch.Tensor, scales: torch.Tensor) -> Weights:
    """codes uint8 [experts, outputs, columns / 2], scales uint8 [experts, outputs, columns / 32]."""
    experts, outputs, half = codes.shape
    words = [
        torch.ops._C.gptq_marlin_repack(one.view(torch.int32).t().contiguous(), 2 * half, outputs, 4, False)
        for one in codes
    ]
    return Weights(torch.stack(words), torch.stack([_scales(one) for one in scales]))


def _scales(scales: torch.Tensor) -> torch.Tensor:
    """[outputs, groups] -> [groups, outputs] of e8m0, in the order in which Marlin's threads take them."""
    outputs = scales.shape[0]
    order = torch.tensor([i + 8 * j for i in range(8) for j in range(8)], dtype=torch.int64, device=scales.device)
    moved = scales.t().reshape(-1, 64)[:, order].reshape(-1, 4)[:, [0, 2, 1, 3]]
    return moved.reshape(-1, outputs).contiguous().view(torch.float8_e8m0fnu)


@functools.cache
def _locks() -> torch.Tensor:
    sms = torch.cuda.get_device_properties(torch.cuda.current_device()).multi_processor_count
    return torch.zeros(4 * sms, dtype=torch.int32, device="cuda")


def activation(inner: torch.Tensor, both: torch.Tensor, clamp: float) -> None:
    torch.ops._C.silu_and_mul_with_clamp(inner, both, clamp)


def experts(
    x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor, gate_up: Weights, down: Weights, clamp: float
) -> torch.Tensor:
    """bf16 [tokens, hidden] of x, fp32 weights and int32 ids [tokens, k]."""
    (tokens, hidden), k, count = x.shape, ids.shape[1], gate_up.words.shape[0]
    intermediate = down.words.shape[1] * 16
    rows = next((rows for rows in (8, 16, 32, 48, 64) if tokens * k / count / rows < 0.9), 64)
    padded = tokens * k + count * (rows - 1)
    if tokens * k < count:
        padded = min(padded, tokens * k * rows)
    order = torch.empty(padded, dtype=torch.int32, device=x.device)
    tiles = torch.empty(-(-padded // rows), dtype=torch.int32, device=x.device)
    last = torch.empty(1, dtype=torch.int32, device=x.device)
    torch.ops._moe_C.moe_align_block_size(ids, count, rows, order, tiles, last, None, None)

    def product(of, to, weight, top_k, multiplied, m, n, columns):
        return torch.ops._moe_C.moe_wna16_marlin_gemm(
            of, to, weight.words, None, weight.scales, None, None, None, _locks(), order, tiles, last, weights, rows,
            top_k, multiplied, E2M1_ID, m, n, columns, False, True, False, -1, -1, -1,
        )  # fmt: skip

    both = x.new_empty(tokens * k, 2 * intermediate)
    product(x, both, gate_up, k, False, tokens, 2 * intermediate, hidden)
    inner = x.new_empty(tokens * k, intermediate)
    activation(inner, both, clamp)
    terms = x.new_empty(tokens * k, hidden)
    product(inner, terms, down, 1, True, tokens * k, hidden, intermediate)
    return torch.sum(terms.view(tokens, k, hidden), dim=1)
