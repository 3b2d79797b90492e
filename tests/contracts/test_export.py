"""torch.export of a Model and of a decode step, strict and not: saved, loaded, and run at other sizes."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sparse_attn import Model, Sampling, build_step_plan, cache_layouts, preset
from sparse_attn.framework.torch_private import leaves, map_leaves
from sparse_attn.generation.steps import Decode, decode_step
from sparse_attn.models.params import random_params
from sparse_attn.ops.ragged.step_plans import build_compressed_plan, build_window_plan

CONTEXT = 256


def model_of(name):
    """One layer; of V4 one with an indexer, which has every kind of cache."""
    spec = preset(name)
    if name == "tiny_v4":
        spec = replace(spec, num_layers=1, layer_kinds=("indexed",), hash_layers=(True,))
    else:
        spec = replace(spec, num_layers=1, moe_layers=(True,), index_layers=(True,))
    return Model(spec, random_params(spec, seed=0), cache_layouts(spec, "fp8"))


def caches_of(model, requests):
    return model.allocate_caches(4 * requests, 64, requests=requests, step_rows=90)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def prefill(model, *counts):
    """(tokens, caches, plan) of prompts of ``counts`` tokens."""
    requests, ends = len(counts), torch.tensor(counts).cumsum(0).tolist()
    size = caches_of(model, 1).kv[0].shape[1] if model.has_rings else 4 * 64
    plan = build_step_plan(
        ints(0, *ends), ints(*counts), torch.arange(4 * requests, dtype=torch.int32).view(requests, 4),
        torch.cat([torch.arange(count) + size * request for request, count in enumerate(counts)]),
        kv_capacity=sum(counts), max_context=CONTEXT,
    )  # fmt: skip
    if model.has_rings:
        plan = plan._replace(ring_table=torch.arange(requests, dtype=torch.int32).unsqueeze(1))
    return torch.arange(sum(counts)) % 250, caches_of(model, requests), plan


class Step(torch.nn.Module):
    """A decode step: plan, forward, draw, advance."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, caches, state):
        return decode_step(self.model, caches, state, Sampling(temperature=0.5, seed=7), CONTEXT)


def decoding(model, *lengths):
    """(caches, state) of requests that hold ``lengths`` tokens."""
    batch = len(lengths)
    rings = torch.arange(batch, dtype=torch.int32).unsqueeze(1) if model.has_rings else None
    return caches_of(model, batch), Decode(
        torch.arange(batch) + 5, ints(*lengths), torch.arange(4 * batch, dtype=torch.int32).view(batch, 4),
        torch.arange(batch + 1, dtype=torch.int32), torch.tensor([3]), rings, torch.arange(batch),
    )  # fmt: skip


def dynamic(arguments):
    """Every size as symbolic as it can be."""
    auto = torch.export.Dim.AUTO
    hints = {torch.Tensor: lambda leaf: [auto] * leaf.dim(), int: lambda leaf: auto, type(None): lambda leaf: None}
    return map_leaves(lambda leaf: hints[type(leaf)](leaf), arguments)


CASES = {
    "model": (lambda model: model, prefill, [(12, 5), (7, 3, 50), (9,)]),
    "decode": (Step, decoding, [(9, 4), (30, 1, 70), (9,)]),
}


@pytest.mark.few(2)
@pytest.mark.parametrize("strict", (False, True))
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", ("tiny_v32", "tiny_v4"))
def test_an_exported_program_is_saved_and_loaded(name, case, strict, tmp_path):
    """Logits, caches and state are those of the module, at the sizes of the export and at others, one request too."""
    of, inputs, sizes = CASES[case]
    model = model_of(name)
    module, arguments = of(model), inputs(model, *sizes[0])
    program = torch.export.export(module, arguments, dynamic_shapes=dynamic(arguments), strict=strict)
    torch.export.save(program, tmp_path / "program.pt2")
    loaded = torch.export.load(tmp_path / "program.pt2")
    prefix = "" if case == "model" else "model."
    assert program.state_dict.keys() == {prefix + name for name in model.params}
    for some in sizes:
        mine, theirs = inputs(model, *some), inputs(model, *some)
        assert torch.equal(loaded.module()(*mine), module(*theirs))
        for got, want in zip(leaves(mine), leaves(theirs)):
            assert torch.equal(got, want) if isinstance(got, torch.Tensor) else got == want


class Plans(torch.nn.Module):
    """A step's plan, and those built of it."""

    def forward(self, query_start_loc, seq_lens, block_table, slot_mapping):
        options = dict(max_context=CONTEXT, kv_capacity=CONTEXT)
        plan = build_step_plan(query_start_loc, seq_lens, block_table, slot_mapping, **options)
        window, compressed = build_window_plan(plan, window=4), build_compressed_plan(plan, ratio=4, block_size=2)
        return [value for value in (*plan, *window, *compressed) if isinstance(value, torch.Tensor)]


@pytest.mark.parametrize("strict", (False, True))
def test_plans_exported_at_two_requests_are_built_for_one(strict):
    def arguments(*counts):
        ends, requests = torch.tensor(counts).cumsum(0).tolist(), len(counts)
        table = torch.arange(4 * requests, dtype=torch.int32).view(requests, 4)
        return ints(0, *ends), ints(*counts), table, torch.arange(sum(counts))

    two = arguments(12, 5)
    program = torch.export.export(Plans(), two, dynamic_shapes=dynamic(two), strict=strict).module()
    for counts in ((7,), (1,), (7, 3, 50), (12, 1)):
        given = arguments(*counts)
        assert all(map(torch.equal, program(*given), Plans()(*given))), counts
    with pytest.raises(AssertionError, match="Guard failed"):
        program(two[0][:-1], *two[1:])  # as eager refuses it


def test_a_program_runs_in_another_process(tmp_path):
    """Which knows the library, and neither the model nor its weights."""
    model = model_of("tiny_v4")
    program = torch.export.export(model, prefill(model, 12, 5), strict=False)
    torch.export.save(program, tmp_path / "program.pt2")
    torch.save(model(*prefill(model, 12, 5)), tmp_path / "logits.pt")
    code = """
import sys, torch, sparse_attn
program = torch.export.load(sys.argv[1])
arguments, _ = program.example_inputs
assert torch.equal(program.module()(*arguments), torch.load(sys.argv[2]))
"""
    files = [str(tmp_path / "program.pt2"), str(tmp_path / "logits.pt")]
    done = subprocess.run(
        [sys.executable, "-c", code, *files], capture_output=True, text=True, cwd=Path(__file__).parents[2]
    )
    assert done.returncode == 0, done.stderr
    assert "weights_only" not in done.stderr  # what a program takes is safe to load
