"""Norms, computed in fp32 and rounded back to the input's dtype, and a product that is not rounded."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from sparse_attn.framework.autocast import no_autocast
from sparse_attn.models.products import product
from sparse_attn.pipeline.options import Options


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., d] over the root of its mean square, times weight [d]; the product is taken in x's dtype, as transformers
    takes it."""
    return weight * F.rms_norm(x, x.shape[-1:], eps=eps)


@no_autocast
def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor, eps: float) -> torch.Tensor:
    """LayerNorm with weight and bias [d] over the last dimension of x."""
    return F.layer_norm(x.float(), weight.shape, weight.float(), bias.float(), eps).to(x.dtype)


def unit_rms(x: torch.Tensor, eps: float, options: Options = Options()) -> torch.Tensor:
    """x [..., d] over the root of its mean square, which is rounded to x's dtype first, as transformers rounds it.
    torch's sums of rows are split by how many rows there are; batch-invariant ones are not."""
    squares, width = x.float().pow(2), x.shape[-1]
    mean = _sum_by_halves(squares) / width if options.batch_invariant else squares.mean(-1, keepdim=True)
    return x * torch.rsqrt(mean + eps).to(x.dtype)


def _sum_by_halves(x: torch.Tensor) -> torch.Tensor:
    """The sum over the last dimension, [..., 1], by additions of single values."""
    width = 1 << (x.shape[-1] - 1).bit_length()
    x = F.pad(x, (0, width - x.shape[-1]))
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x


@no_autocast
def linear_fp32(x: torch.Tensor, weight: torch.Tensor, options: Options = Options()) -> torch.Tensor:
    """x [T, d] times weight [n, d] -> fp32 [T, n]; neither is rounded, products are added up in fp32.

    On a GPU one kernel reads bf16 of both as they are. Elsewhere, and for weights in fp32, x is widened first.
    Batch-invariant: ops.layers.products.grouped_linear multiplies what is widened.
    """
    if options.batch_invariant:
        return product(x.float(), weight.float(), options)
    if x.is_cuda and x.dtype == torch.bfloat16 and weight.dtype == torch.bfloat16:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return F.linear(x.float(), weight.float())
