"""Debug mode: every op takes what is legal, names what is not, and leaves compiled and captured calls as they are."""

from __future__ import annotations

import functools
import importlib
import math
import re
import subprocess
import sys
import threading
import warnings

import pytest
import torch
from support.arguments import GOOD, ints, longs
from support.extremes import INT_MAX, INT_MIN

from sparse_attn.explanation import QUESTIONS, ask
from sparse_attn.framework import debug, dispatch, gradients, registration, torch_private
from sparse_attn.framework.target import H200
from sparse_attn.ops.attention.sparse import sparse_attn_prefill
from sparse_attn.ops.layers.rope import apply_rope
from sparse_attn.ops.layers.router import hash_routed_experts
from sparse_attn.ops.ragged.step_plans import build_step_plan, build_window_plan
from sparse_attn.ops.topk.select import top_k_per_row
from sparse_attn.types import Ragged

PAGED_BAD = [
    (dict(context_lens=ints([5, 12], [0, 0])), r"context_lens[0, 1]: got 12, allowed: at most 11 (max_context_len)"),
    (dict(block_table=ints([3, 4, 0], [0] * 3)), "block_table[0, 1]: got 4, allowed: -1, or 0 to 3 (blocks of the cache)"),
    (dict(block_table=ints([INT_MIN, 1, 0], [0] * 3)), f"block_table[0, 0]: got {INT_MIN}"),
    (dict(block_table=ints([3], [0])), "context_lens[0, 0]: got 5, allowed: at most 4 (what block_table has room for)"),
]  # fmt: skip
DENSE_BAD = [
    (dict(kv_start=ints(0, -1, 9)), "kv_start[1]: got -1, allowed: 0 to 9 (keys)"),
    (dict(kv_end=ints(4, 0, 10)), "kv_end[2]: got 10, allowed: at most 9 (keys)"),
]
SLOTS_BAD = [
    (dict(slot_mapping=longs(-1, 12, 0)), "slot_mapping[1]: got 12, allowed: -1, or 0 to 11 (slots of the cache)"),
    (dict(slot_mapping=ints(-1, 3, INT_MIN)), f"slot_mapping[2]: got {INT_MIN}"),
    (dict(slot_mapping=longs(3, -1, 3)), "slot_mapping[2]: got 3, allowed: slots that no other row writes"),
    (dict(slot_mapping=longs(0, -1, 0)), "slot_mapping[2]: got 0, allowed: slots that no other row writes"),
]
BAD = {
    "indexer_k_quant_and_cache": SLOTS_BAD,
    "write_kv_cache": SLOTS_BAD,
    "gather_indexer_k": [
        (dict(kv_indptr=ints(0, 7, 6)), "kv_indptr[2]: got 6, allowed: at least 7 (the value before it)"),
        (dict(kv_indptr=ints(0, 7, 14)), "kv_indptr[2]: got 14, allowed: 0 to 13 (capacity)"),
        (dict(kv_indptr=ints(0, 0, 13)), "kv_indptr[2]: got 13, allowed: at most 12 (what the row of block_table"),
        (dict(kv_indptr=ints(0, 5, 18), capacity=18), "kv_indptr[2]: got 18, allowed: at most 17 (what the row of block_table"),
        (dict(block_table=ints([3, 4, 0], [1, 2, 0])), "block_table[0, 1]: got 4, allowed: -1, or 0 to 3"),
    ],
    "gather_kv_cache": [
        (dict(starts=ints(-1, 14)), "starts[0]: got -1, allowed: at least 0"),
        (dict(kv_indptr=ints(0, 14, 13)), "kv_indptr[2]: got 13"),
        (dict(block_table=ints([0, 3, 0], [5, 2, 3])), "block_table[1, 0]: got 5"),
        (dict(starts=None), f"block_table[0, 0]: got {INT_MIN}, allowed: -1, or 0 to 4 (blocks of the cache)"),
    ],
    "indexer_q_rope_quant": [
        (dict(positions=ints(0, 9, 0)), "positions[1]: got 9, allowed: -1, or 0 to 8 (rows of cos_sin)"),
        (dict(positions=longs(0, 0, -2)), "positions[2]: got -2"),
    ],
    "mqa_logits": DENSE_BAD,
    "index_topk_prefill": DENSE_BAD,
    "paged_mqa_logits": PAGED_BAD,
    "index_topk_decode": PAGED_BAD,
    "index_topk_decode_slots": PAGED_BAD,
    "top_k_per_row": [
        (dict(row_starts=ints(0, INT_MIN, 0)), f"row_starts[1]: got {INT_MIN}, allowed: 0 to 9 (the width of logits)"),
        (dict(row_starts=None, row_ends=ints(9, 9, INT_MAX)), f"row_ends[2]: got {INT_MAX}, allowed: at most 9"),
    ],
    "count_digits": [
        (dict(row_starts=ints(0, INT_MIN, 0)), f"row_starts[1]: got {INT_MIN}, allowed: 0 to 9 (the width of logits)"),
        (dict(sums=torch.full((3, 2048), -1, dtype=torch.int32)), "sums[0, 0]: got -1, allowed: at least 0"),
    ],
    "count_ties": [
        (dict(row_starts=None, row_ends=ints(9, 9, INT_MAX)), f"row_ends[2]: got {INT_MAX}, allowed: at most 9"),
        (dict(sums=torch.full((3, 1024), -1, dtype=torch.int32)), "sums[0, 0]: got -1, allowed: at least 0"),
    ],
    "take_winners": [
        (dict(row_starts=None, row_ends=ints(9, 9, INT_MAX)), f"row_ends[2]: got {INT_MAX}, allowed: at most 9"),
        (dict(ties=torch.full((2, 3, 3), 5, dtype=torch.uint8)), "ties[0, 0, 0]: got 5, allowed: at most 4 (block_size)"),
        (dict(above=torch.full((3, 3), 5, dtype=torch.uint8)), "above[0, 0]: got 5, allowed: at most 4 (block_size)"),
    ],
    "pack_candidates": [
        (dict(columns=ints([0, 9], [1, -1], [-1, -1])), "columns[0, 1]: got 9, allowed: at most 8 (the last column"),
        (dict(columns=ints([0, 8], [1, -2], [-1, -1])), "columns[1, 1]: got -2, allowed: at least -1"),
    ],
    "merge_candidates": [
        (dict(columns=ints([0, 8], [1, -2], [-1, -1])), "columns[1, 1]: got -2, allowed: at least -1"),
        (dict(candidates=torch.full((2, 3, 3), 0x05050505, dtype=torch.int32)),
         "counts[0, 0, 0]: got 5, allowed: at most 4 (block_size)"),
    ],
    "build_ragged_indices_from_dense": [
        (dict(indices=ints([4, -2, 0], [0, 0, 0])), "indices[0, 1]: got -2, allowed: -1, or -5 and the 9 rows behind it"),
        (dict(indices=ints([5, 0, 0], [0, 0, 0])), "indices[0, 0]: got 5"),
        (dict(lengths=ints(2, 4)), "lengths[1]: got 4, allowed: at most 3 (the width of indices)"),
        (dict(row_offsets=None, indices=ints([10, 0, 0], [0, 0, 0])), "indices[0, 0]: got 10"),
    ],
    "compute_global_topk_ragged_indices_and_indptr": [
        (dict(topk=ints([0, 12], [0, 0], [0, 0])), "topk[0, 1]: got 12, allowed: -1, or 0 to 11 (tokens that block_table"),
        (dict(topk=ints([0, 0], [0, -2], [0, 0])), "topk[1, 1]: got -2"),
        (dict(request_ids=ints(0, 2, 0)), "request_ids[1]: got 2, allowed: -1, or 0 to 1 (requests)"),
        (dict(topk=ints([8, 0], [4, 4], [0, 0])), f"block_table[0, 2]: got {INT_MIN}, allowed: -1, or 0 to"),
        (dict(topk=ints([0, 0], [4, 3], [0, 0])), f"block_table[1, 0]: got {INT_MAX}"),
    ],
    "window_indices": [
        (dict(positions=ints(5, 11, -2, 8)), "positions[2]: got -2, allowed: at least -1"),
        (dict(request_ids=ints(0, 1, INT_MAX, -1)), f"request_ids[2]: got {INT_MAX}"),
        (dict(positions=ints(5, 13, -1, 8)), f"block_table[1, 0]: got {INT_MAX}"),
    ],
    "entry_indices": [
        (dict(limits=ints(8, 0, 0, 0, 21)), "limits[4]: got 21, allowed: at most 20 (max_entries)"),
        (dict(limits=ints(13, 0, 0, 0, 0)), "limits[0]: got 13, allowed: at most 12 (entries that block_table has room for"),
        (dict(request_ids=ints(0, 1, 1, -2, -1)), "request_ids[3]: got -2"),
        (dict(limits=ints(9, 0, 0, 0, 0)), f"block_table[0, 2]: got {INT_MIN}"),
    ],
    "combine_topk_swa_indices_ragged": [
        (dict(topk=ints([3, -2, 9], [0, 0, 1], [4, 5, 6])), "topk[0, 1]: got -2"),
        (dict(entry_offsets=ints(7, 0, 0)), "topk[0, 0]: got 3, allowed: -1, or -7 and the 9 rows behind it"),
        (dict(window_offsets=ints(4, 0, 8)), "position[0, 0]: got 6"),
        (dict(window_offsets=ints(-5, 0, 8)), "position[0, 2]: got 4"),
        (dict(positions=ints(6, INT_MIN, 1)), f"positions[1]: got {INT_MIN}"),
        (dict(topk=None, max_entries=3), "limits[0]: got 4, allowed: at most 3 (max_entries)"),
    ],
    "step_plan": [
        (dict(slot_mapping=longs(1, 2, -1, 3, 4, 5, -2, 9)), "slot_mapping[6]: got -2"),
        (dict(query_start_loc=ints(0, 2, 4, 6, 5, 7)), "query_start_loc[4]: got 5, allowed: at least 6"),
        (dict(query_start_loc=ints(0, 2, 4, 6, 6, 9)), "query_start_loc[5]: got 9, allowed: 0 to 8 (rows of the step)"),
        (dict(query_start_loc=ints(0, 2, 3, 6, 6, 7)), "query_start_loc[2]: got 3, allowed: at least 4 (behind the decode"),
        (dict(seq_lens=ints(5, -2, 1, 9, 0)), "seq_lens[2]: got 1, allowed: at least 2 (the rows of this step"),
    ],
    "compressed_plan": [
        (dict(request_ids=ints(0, 1, 2, -1)), "request_ids[2]: got 2"),
        (dict(positions=ints(7, 12, -2, -1)), "positions[2]: got -2"),
        (dict(positions=ints(16, 12, -1, -1)), "positions[0]: got 16, allowed: -1, or 0 to 15 (tokens whose entries"),
        (dict(kv_indptr=ints(0, 8, 7)), "kv_indptr[2]: got 7"),
        (dict(positions=ints(7, 11, -1, -1)), f"block_table[1, 2]: got {INT_MIN}, allowed: at least -1"),
    ],
    "sparse_attn_prefill": [
        (dict(indptr=ints(1, 3, 2, 5)), "ragged.indptr[2]: got 2, allowed: at least 3"),
        (dict(indptr=ints(-1, 3, 3, 5)), "ragged.indptr[0]: got -1, allowed: 0 to 6 (the capacity of indices)"),
        (dict(indices=ints(0, 8, -1, 0, 9, 0)), "ragged.indices[4] of row 2: got 9, allowed: -1, or 0 to 8 (rows of kv)"),
        (dict(indptr=ints(0, 3, 3, 5)), f"ragged.indices[0] of row 0: got {INT_MIN}"),
        (dict(sink=torch.tensor([0.0, math.nan])), "sink[1]: got nan"),
    ],
    "sparse_attn_prefill_backward": [
        (dict(indptr=ints(1, 3, 2, 5)), "ragged.indptr[2]: got 2, allowed: at least 3"),
        (dict(indices=ints(0, 8, -1, 0, 9, 0)), "ragged.indices[4] of row 2: got 9, allowed: -1, or 0 to 8 (rows of kv)"),
        (dict(sink=torch.tensor([0.0, math.nan])), "sink[1]: got nan"),
        (dict(lse=torch.full((3, 2), math.inf)), "lse[0, 0]: got inf, allowed: what the forward gave"),
    ],
    "sparse_attn_decode": [
        (dict(indices=ints(11, 12, 0)), "ragged.indices[1] of row 1: got 12, allowed: -1, or 0 to 11 (slots of the cache)"),
        (dict(extra_indices=ints(7, 8)), "extra_ragged.indices[1] of row 0: got 8"),
        (dict(extra_indptr=ints(0, 3, 3)), "extra_ragged.indptr[1]: got 3"),
    ],
    "sparse_attn_into": [
        (dict(indptr=ints(0, 2, 1)), "ragged.indptr[2]: got 1, allowed: at least 2"),
        (dict(extra_indptr=ints(0, 3, 3)), "extra_ragged.indptr[1]: got 3"),
        (dict(sink=torch.tensor([0.0, math.nan])), "sink[1]: got nan"),
    ],
    "merge_attn_states": [
        (dict(lses=torch.tensor([[[0.0, 1.0]] * 2, [[0.0, math.inf]] * 2])), "lses[1, 0, 1]: got inf, allowed: numbers, and -inf"),
        (dict(sink=torch.tensor([math.nan, 0.0])), "sink[0]: got nan"),
    ],
    "apply_rope": [(dict(positions=ints(0, 5)), "positions[1]: got 5, allowed: -1, or 0 to 4 (rows of cos_sin)")],
    "biased_grouped_topk": [
        (dict(logits=torch.tensor([[0.0, 0.0, math.nan, 0.0]])), "logits[0, 2]: got nan"),
        (dict(bias=torch.tensor([0.0, math.nan, 0.0, 0.0])), "bias[1]: got nan"),
    ],
    "grouped_linear": [
        (dict(ends=ints(3, 3)), "ends[0]: got 3, allowed: at most 2 (rows)"),
        (dict(ends=ints(-1, 2)), "ends[0]: got -1"),
        (dict(ends=ints(2, 1)), "ends[1]: got 1, allowed: ascending ends, at least 2"),
    ],
    "grouped_linear_fp8": [(dict(ends=ints(2, 1)), "ends[1]: got 1, allowed: ascending ends, at least 2")],
    "packed_experts": [
        (dict(weights=torch.tensor([[1.0, 1.0], [math.nan, 1.0]])), "weights[1, 0]: got nan"),
    ],
    "hyper_mix": [
        (dict(streams=torch.full((2, 2, 3), math.nan)), "streams[0, 0, 0]: got nan"),
        (dict(raw=torch.full((2, 8), math.inf)), "fn times streams[0, 0]: got inf"),
        (dict(scale=torch.tensor([1.0, 1.0, -math.inf])), "scale[2]: got -inf"),
    ],
    "hyper_merge": [(dict(comb=torch.full((2, 2, 2), math.nan)), "comb[0, 0, 0]: got nan")],
    "compress_and_cache": [
        (dict(positions=ints(2, 4, -1, 0, 1, 5)), "positions[1]: got 4, allowed: one more than in the row before"),
        (dict(request_ids=ints(1, 1, 1, 0, 1, -1)), "positions[4]: got 1, allowed: one more"),
        (dict(positions=ints(2, 3, -2, 0, 1, 5)), "positions[2]: got -2"),
        (dict(request_ids=ints(1, 1, 3, 0, 0, -1)), "request_ids[2]: got 3, allowed: -1, or 0 to 2 (requests)"),
        (dict(slot_mapping=longs(0, 12, 0, 0, -1, 0)), "slot_mapping[1]: got 12"),
        (dict(slot_mapping=longs(0, 3, 0, 0, 3, 0)), "slot_mapping[4]: got 3, allowed: slots that no other row writes"),
        (dict(cos_sin=torch.ones(2, 4)), "positions[1]: got 3, allowed: -1, or 0 to 2 (entries begin within"),
        (dict(state_table=ints([2], [0], [0])), "state_table[0, 0]: got 2, allowed: -1, or 0 to 1"),
    ],
}  # fmt: skip


@pytest.fixture
def debugging(monkeypatch):
    monkeypatch.setattr(debug, "on", lambda: True)


def run(name, arguments, impl="auto"):
    return getattr(torch.ops.sparse_attn, name)(*arguments.values(), impl)


def ops():
    ends = {name.removeprefix("sparse_attn::") for name in (gradients.NO_BACKWARD, gradients.REFUSE)}
    return {*torch_private.operators("sparse_attn")} - ends


def test_every_op_has_rules_and_cases():
    assert ops() == GOOD.keys() == BAD.keys()
    for name in ops():
        schema = torch_private.schema(getattr(torch.ops.sparse_attn, name).default)
        expected = [argument.name for argument in schema.arguments][:-1]
        assert expected == list(GOOD[name]()) and registration.OPERATORS[name].rules, name


@pytest.mark.parametrize("name", GOOD)
def test_legal_values_pass(name, debugging):
    got = run(name, GOOD[name]())
    debug.on = lambda: False  # the fixture puts it back
    torch.testing.assert_close(got, run(name, GOOD[name]()), rtol=0, atol=0, equal_nan=True)


CASES = [(name, change, message) for name, cases in BAD.items() for change, message in cases]


@pytest.mark.parametrize("name, change, message", CASES, ids=[f"{name}-{n}" for n, (name, *_) in enumerate(CASES)])
def test_wild_values_are_named(name, change, message, debugging):
    with pytest.raises(ValueError, match="^" + re.escape(f"{name}: {message}")):
        run(name, GOOD[name]() | change)
    debug.on = lambda: False
    run(name, GOOD[name]() | change)  # and otherwise they count as none


WHOLE = "cache extra_cache state cos_sin position_bias norm_weight base scale bias sink".split()


@pytest.mark.parametrize("name", GOOD)
def test_nothing_is_there(name, debugging):
    """No rows, no requests, no blocks in a table: the rules meet empty tensors."""
    empty = GOOD[name]()
    for key, value in empty.items():
        if isinstance(value, torch.Tensor) and key not in WHOLE:
            empty[key] = value[:0]
            if "indptr" in key or key == "query_start_loc":
                empty[key] = torch.zeros(1, dtype=torch.int32)
    if name == "step_plan":
        empty["num_decodes"] = 0
    registration.OPERATORS[name].rules(*empty.values())


def test_composites_have_rules(debugging):
    logits, experts = torch.ones(2, 4), ints([0, 3], [-1, 4])
    hash_routed_experts(logits, ints(0, -1), experts)
    with pytest.raises(ValueError, match=r"^hash_routed_experts: tokens\[0\]: got 2"):
        hash_routed_experts(logits, ints(2, 0), experts)
    with pytest.raises(
        ValueError, match=r"^hash_routed_experts: table\[1, 1\]: got 4, allowed: -1, or 0 to 3 \(experts\)"
    ):
        hash_routed_experts(logits, ints(0, 1), experts)
    plan = build_step_plan(
        ints(0, 1, 4), ints(3, 3), ints([0], [1]), longs(2, 4, 5, 6), num_decodes=1, max_context=4, kv_capacity=3
    )
    build_window_plan(plan, window=2)
    for change, message in (
        (dict(request_ids=ints(0, 1, 0, 1)), r"request_ids\[1\]: got 0, allowed: -1, or 1 to 1 \(prefill requests\)"),
        (dict(positions=ints(2, 0, -2, 2)), r"positions\[1\]: got -2"),
        (dict(kv_indptr=ints(0, -3)), r"kv_indptr\[1\]: got -3"),
    ):
        with pytest.raises(ValueError, match="^window_plan: " + message):
            build_window_plan(plan._replace(**change), window=2)


@pytest.fixture
def on_h200(debugging, monkeypatch):
    """Launchers of packages choose on a CPU as for an H200; kernels do not run."""
    for package in "attention.sparse indexer.scores layers.products topk.fused topk.select".split():
        launch = importlib.import_module(f"sparse_attn.ops.{package}.launch")
        monkeypatch.setattr(launch, "target_of", lambda device: H200)
    monkeypatch.setattr("sparse_attn.ops.ragged.lists.launch.pack_rows", lambda *args, **options: None)
    silent = property(lambda kernel: functools.wraps(kernel.launch())(lambda call, plan: None))
    monkeypatch.setattr(dispatch.Kernel, "launcher", silent)
    monkeypatch.setattr(registration, "resolve_impl", lambda impl, *_: "triton" if impl == "auto" else impl)
    debug._warn_once.cache_clear()
    yield
    debug._warn_once.cache_clear()


@pytest.mark.parametrize("name", QUESTIONS)
def test_launchers_tell_of_every_choice_they_make(name, on_h200):
    arguments = GOOD[name]()
    question = ask(name, [*arguments.values()])
    parts = [part for part in (question, question.scores) if part is not None]
    reasons = [reason for part in parts for reason in part.choose(part.problem, H200).slow_path]
    assert bool(reasons) == (name not in ("top_k_per_row", "grouped_linear_fp8", "packed_experts"))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(2):
            run(name, arguments)
    assert [str(one.message) for one in told] == ([f"{name}: {'; '.join(reasons)}"] if reasons else [])


def test_a_slow_path_into_given_tensors_is_told(on_h200):
    with pytest.warns(debug.SlowPathWarning, match="^sparse_attn_into: hopper.swap_ab: "):
        run("sparse_attn_into", GOOD["sparse_attn_into"]())


@pytest.fixture
def attend(on_h200):
    """sparse_attn_prefill of two tokens."""

    def attend(heads, d_v=512, **options):
        q, kv = (torch.zeros(*size, d_v + 64, dtype=torch.bfloat16) for size in ((2, heads), (3,)))
        return sparse_attn_prefill(q, kv, Ragged(ints(0, 1, 2), ints(0, 1, 3)), scale=1.0, d_v=d_v, **options)

    return attend


SLOW = "^sparse_attn_prefill: hopper.swap_ab: d_v: got 256, allowed: 512; .*hopper.prefill_bf16: d_v: got 256, allowed: 512"


def test_a_slow_path_is_said_once_with_its_reason(attend):
    with pytest.warns(debug.SlowPathWarning, match=SLOW) as told:
        threads = [threading.Thread(target=attend, args=(64, 256)) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attend(64, 256)
    with pytest.warns(debug.SlowPathWarning, match="d_v: got 128"):
        attend(64, 128)


def test_a_slow_path_is_not_said_of_what_is_asked_for_captured_or_traced(attend, monkeypatch):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        attend(64, 256, impl="reference")
        for heads in (16, 48, 64):  # a kernel of the GPU's own takes these
            attend(heads)
        for module, name in ((debug.streams, "capturing"), (torch.compiler, "is_compiling")):
            with monkeypatch.context() as patch:
                patch.setattr(module, name, lambda *_: True)
                attend(64, 256)
    with pytest.warns(debug.SlowPathWarning, match=SLOW):
        attend(64, 256)


CODE = """
import os, torch
from sparse_attn import top_k_per_row
scores, ends = torch.zeros(2, 4), torch.tensor([4, 5], dtype=torch.int32)
os.environ.pop("SPARSE_ATTN_DEBUG", None)
{before}
os.environ["SPARSE_ATTN_DEBUG"] = "1"
try:
    top_k_per_row(scores, 1, None, ends)
    print("silent")
except ValueError as error:
    print(error)
"""


@pytest.mark.parametrize("before, said", [
    ("", "top_k_per_row: row_ends[1]: got 5, allowed: at most 4 (the width of logits)"),
    ("top_k_per_row(scores, 1, None, ends)", "silent"),
])  # fmt: skip
def test_the_variable_is_read_when_an_op_first_runs(before, said):
    done = subprocess.run([sys.executable, "-c", CODE.format(before=before)], capture_output=True, text=True)
    assert done.stdout.strip() == said, done.stderr


def test_off_nothing_is_looked_at(monkeypatch):
    monkeypatch.setattr(debug, "on", lambda: False)
    monkeypatch.setattr(debug, "refuse", None)
    top_k_per_row(torch.zeros(1, 4), 1, None, ints(5))
    apply_rope(torch.ones(1, 8), ints(9), torch.ones(5, 8), start=0, interleaved=True)


def test_graphs_are_the_same(monkeypatch):
    """Dynamo sees nothing of it, and the ops of a compiled call look when they run."""
    graphs = []

    def backend(graph, _):
        graphs.append(graph.code)
        return graph.forward

    def step(logits, ends, x, positions, table):
        chosen = top_k_per_row(apply_rope(logits, positions, table, start=0, interleaved=True), 2, None, ends)
        return chosen, hash_routed_experts(x, positions, chosen)

    arguments = torch.ones(2, 4), ints(4, 3), torch.ones(2, 6), ints(1, 0), torch.ones(5, 4)
    for flag in (False, True):
        monkeypatch.setattr(debug, "on", lambda flag=flag: flag)
        torch.compiler.reset()
        compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=True)
        torch.testing.assert_close(compiled(*arguments), step(*arguments))
    assert len(graphs) == 2 and graphs[0] == graphs[1]
    with pytest.raises(ValueError, match=r"^top_k_per_row: row_ends\[0\]: got 5"):
        compiled(arguments[0], ints(5, 3), *arguments[2:])


@pytest.mark.gpu
def test_captured_calls_are_let_through(debugging):
    logits, ends = torch.rand(2, 64, device="cuda"), ints(64, 10).cuda()
    want = top_k_per_row(logits, 4, None, ends)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = top_k_per_row(logits, 4, None, ends)
    graph.replay()
    assert torch.equal(got, want)
    with pytest.raises(ValueError, match=r"^top_k_per_row: row_ends\[1\]: got 65"):
        top_k_per_row(logits, 4, None, ends.add_(torch.tensor([0, 55], device="cuda", dtype=torch.int32)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", GOOD)
def test_on_the_gpu(name, debugging):
    def there(arguments):
        return {key: value.cuda() if isinstance(value, torch.Tensor) else value for key, value in arguments.items()}

    run(name, there(GOOD[name]()))
    for change, message in BAD[name]:
        with pytest.raises(ValueError, match="^" + re.escape(f"{name}: {message}")):
            run(name, there(GOOD[name]() | change))
