"""What index scores with the highest of every group must be."""

from __future__ import annotations

import torch
from support.extremes import INF, NAN

from sparse_attn.ops.topk.shapes import GROUP


def check_highest(launch, rows, width, limits, device):
    """launch(out, maxima, group): the scores' bits are what they are without, groups are whole, what lies around is
    untouched."""
    room = -(-width // GROUP) * GROUP

    def dirt(columns):
        return torch.full((rows + 1, columns), 12345.0, device=device)

    plain, wide, highest = dirt(room + 3), dirt(room + 3), dirt(room // GROUP + 3)
    launch(plain[:rows, :width], None, 1)
    launch(wide[:rows, :width], highest[:rows, : room // GROUP], GROUP)
    limits = limits.reshape(-1, 1).clamp(0, width)
    column = torch.arange(room, device=device)
    scores = wide[:rows, :room]
    seen, whole = column < limits, column < -(-limits // GROUP) * GROUP
    assert torch.equal(scores[seen].view(torch.int32), plain[:rows, :room][seen].view(torch.int32))
    assert (scores[whole & ~seen] == -INF).all()
    groups = scores.masked_fill(~whole, -INF).unflatten(1, (-1, GROUP))
    want = groups.masked_fill(groups.isnan(), -INF).amax(2).masked_fill(groups.isnan().all(2), NAN)
    there = whole[:, ::GROUP]
    torch.testing.assert_close(highest[:rows, : room // GROUP][there], want[there], rtol=0, atol=0, equal_nan=True)
    for around in (wide[rows], wide[:, room:], highest[rows], highest[:, room // GROUP :]):
        assert (around == 12345.0).all()
