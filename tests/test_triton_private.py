"""triton_private.py: what the interpreter is mended for."""

import pytest
import torch
import triton
import triton.language as tl

from sparse_attn.device import order  # noqa: F401  (any kernel imports a file of device)


@triton.jit
def keep_where(x, out, limit, SIZE: tl.constexpr):
    column = tl.arange(0, SIZE)
    wanted = (limit > 3) & (limit % 2 == 0)
    tl.store(out + column, tl.load(x + column, mask=(column < limit) & wanted, other=-1), mask=wanted & (column != 1))


@pytest.mark.kernel
def test_a_scalar_comparison_is_part_of_a_mask(device):
    x = torch.arange(8, device=device)
    for limit, want in ((6, [0, 9, 2, 3, 4, 5, -1, -1]), (5, [9] * 8), (2, [9] * 8)):
        out = torch.full_like(x, 9)
        keep_where[(1,)](x, out, limit, 8)
        assert out.tolist() == want
