"""torch_private.py against what torch says and does itself."""

import torch
import torch._dynamo

from sparse_attn.framework.torch_private import counters, dynamo_counts, mark_sizes, uncompiled


def test_marks_are_what_torch_makes_them():
    mine, theirs = torch.zeros(3, 4, 5), torch.zeros(3, 4, 5)
    assert mark_sizes(mine, dynamic=(0, 1), static=(2,)) is mine
    torch._dynamo.maybe_mark_dynamic(theirs, [0, 1])
    torch._dynamo.mark_static(theirs, 2)
    assert {} != vars(theirs).items() <= vars(mine).items()


def test_counts_are_dynamos():
    torch.compiler.reset()
    before = dynamo_counts()
    assert torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2)).sum() == 4
    assert dynamo_counts() == (before[0] + 1, before[1]) and counters()["stats"]["unique_graphs"] == before[0] + 1


def test_what_was_compiled():
    module = torch.nn.Linear(2, 2)
    assert uncompiled(torch.compile(module)) is module is uncompiled(module)
