"""Drawing the next token: greedy, or Gumbel-max with noise that is a function of (seed, position, token id).

Plain torch without a generator: capturable, the same draw on every device (up to the last bit of a float64 logarithm),
and independent of the batch a row stands in.
"""

from __future__ import annotations

import torch

from sparse_attn import checks
from sparse_attn.ops.sampling import reference

LOGIT_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def sample(
    logits: torch.Tensor, positions: torch.Tensor, *, temperature: float, seed: int | torch.Tensor
) -> torch.Tensor:
    """Token ids int64 [rows], drawn from softmax(logits / temperature), or the largest logit when temperature is 0.

    logits: fp32, bf16 or fp16 [rows, vocab]; NaN counts as -inf, which is never drawn unless the whole row is.
    positions: int32 or int64 [rows], any value.
    seed: one for all rows, or int64 [rows], one a row. Rows with equal position, seed and logits draw the same token.
    Take seeds from row_seeds where they should not. Greedy ties go to the lowest id, a row without a logit above -inf
    to 0. A temperature below 2**-160, where no noise outweighs a difference of two fp32 numbers, is greedy.

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
    checks.check_temperature(temperature)
    if isinstance(seed, torch.Tensor):
        checks.check_dtype("seed", seed, (torch.int64,))
        checks.check_shape("seed", seed, (logits.shape[0],), "[rows]")
        checks.check_same_device(logits=logits, seed=seed)
    else:
        checks.check_seed("seed", seed)
    return reference.sample(logits, positions, temperature, seed)


def row_seeds(seed: int, rows: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """int64 [rows], the random streams (seed, 0), (seed, 1), ... as seeds of ``sample``. Row 0's is ``seed`` itself; no
    two seeds share the stream of one row."""
    checks.check_seed("seed", seed)
    checks.check_at_least("rows", rows, 0)
    return reference.row_seeds(int(seed), rows, device)
