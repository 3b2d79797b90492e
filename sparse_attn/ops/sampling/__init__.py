"""Drawing the next token: greedy, or Gumbel-max with noise that is a function of (seed, position, token id).

Plain torch without a generator: capturable, the same draw on every device (up to the last bit of a float64 logarithm),
and independent of the batch a row stands in.
"""

from __future__ import annotations

import torch

from sparse_attn import checks
from sparse_attn.ops.sampling import reference

LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def sample(logits: torch.Tensor, positions: torch.Tensor, *, temperature: float, seed: int) -> torch.Tensor:
    """Token ids int64 [rows], drawn from softmax(logits / temperature), or the largest logit when temperature is 0.

    logits: fp32, bf16 or fp16 [rows, vocab]; NaN counts as -inf, which is never drawn unless the whole row is.
    positions: int32 or int64 [rows], any value: rows with equal position, seed and logits draw the same token.
    Ties go to the lowest id, a row without a logit above -inf to 0.

    TypeError or ValueError for wrong dtypes, shapes, an empty vocabulary, a temperature that is negative or not
    finite, or a seed outside int64.
    """
    checks.check_dtype("logits", logits, LOGIT_DTYPES)
    checks.check_rank("logits", logits, 2)
    checks.check_dtype("positions", positions, (torch.int32, torch.int64))
    checks.check_shape("positions", positions, (logits.shape[0],), "[rows]")
    checks.check_same_device(logits=logits, positions=positions)
    if logits.shape[1] < 1:
        raise ValueError(f"logits: got shape {list(logits.shape)}, allowed: [rows, at least 1]")
    if not 0 <= temperature < float("inf"):
        raise ValueError(f"temperature: got {temperature}, allowed: 0 (greedy) or positive and finite")
    if not -(2**63) <= seed < 2**63:
        raise ValueError(f"seed: got {seed}, allowed: a signed 64-bit integer")
    return reference.sample(logits, positions, temperature, seed)
