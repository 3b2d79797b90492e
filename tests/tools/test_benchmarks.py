"""Benchmark suites at tiny sizes on the CPU: they run, they fill every record, and a wrong result is refused."""

import re
from contextlib import contextmanager

import pytest
import torch

SUITES = """
    decode_bf16 decode_few_heads decode_v32 decode_v4 layer_v32 layer_v4 layer_v4_mxfp4 paged_scores prefill_chain
    prefill_few_heads prefill_prompt prefill_ragged prefill_scores prefill_v32 prefill_v4 select_decode select_few
    select_prefill sustained topk_decode topk_prefill""".split()
ALONE = (  # measured against something other than the peers
    "arrivals", "compat", "decode_growth", "decode_invariant", "decode_loop", "experts_few", "experts_many",
    "experts_fp8", "experts_w4a8", "hf_bridge", "hf_layer", "host_calls", "linears_exact", "linears_few", "linears_many", "load",
    "loop_invariant", "paged_scores_mxfp4", "plan_cache", "prefill_forms",
    "prefill_portable", "prefill_scores_mxfp4", "rank_parts", "rank_share", "rank_step", "real_share",
    "speculation", "step_share",
)  # fmt: skip


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


class PeersDouble:
    """The methods of benchmarks.peers.Peers over our references; garbage where the peers leave garbage."""

    def sparse_prefill(self, q, kv, indices, scale, sink=None, lengths=None):
        from sparse_attn.ops.attention.sparse import sparse_attn_prefill
        from sparse_attn.ops.ragged.lists import build_ragged_indices_from_dense

        ragged = build_ragged_indices_from_dense(indices, lengths)
        return tuple(sparse_attn_prefill(q, kv, ragged, scale=scale, d_v=512, sink=sink, impl="reference"))

    def decode_plan(self):
        return object()

    def decode(self, q, cache, indices, plan, scale, sink=None, extra_cache=None, extra_indices=None):
        from benchmarks.inputs import LATENT_LAYOUT, packed
        from benchmarks.windowed import LAYOUT

        from sparse_attn.ops.attention.sparse import sparse_attn_decode

        assert q.shape[:2] == indices.shape[:2]
        rows = q.flatten(0, 1), cache, packed(indices.flatten(0, 1))
        more = dict(layout=LATENT_LAYOUT)
        if extra_cache is not None:
            extra = packed(extra_indices.flatten(0, 1))
            more = dict(layout=LAYOUT, extra_cache=extra_cache, extra_ragged=extra, extra_layout=LAYOUT)
        return sparse_attn_decode(*rows, scale=scale, sink=sink, impl="reference", **more).out

    def scores(self, *inputs):
        from sparse_attn.ops.indexer.scores import fp8_mqa_logits

        logits = fp8_mqa_logits(*inputs, impl="reference")
        return torch.where(logits.isneginf(), 123.0, logits)

    def paged_plan(self, context_lens, block_size):
        return object()

    def paged_scores(self, q, cache, weights, context_lens, block_table, plan, max_context_len):
        from benchmarks.inputs import INDEX_LAYOUT

        from sparse_attn.ops.indexer.scores import fp8_paged_mqa_logits

        inputs = q, cache, weights, context_lens, block_table, max_context_len, INDEX_LAYOUT
        logits = fp8_paged_mqa_logits(*inputs, impl="reference")
        return torch.where(logits.isneginf(), 123.0, logits)

    def top_k_prefill(self, logits, row_starts, row_ends, out):
        from sparse_attn.ops.topk.select import top_k_per_row

        return out.copy_(top_k_per_row(logits, out.shape[1], row_starts, row_ends, impl="reference").flip(1))

    @staticmethod
    def top_k_decode_name(rows):
        return "persistent_topk"

    def top_k_decode(self, logits, lengths, out, scratch):
        return self.top_k_prefill(logits, None, lengths, out)

    def slots(self, request_ids, block_table, positions, block_size):
        table = block_table[request_ids.long()]
        slots = table.gather(1, positions.clamp_min(0).long() // block_size) * block_size + positions % block_size
        return torch.where(positions < 0, positions, slots)


def dry_run(name, peers=None):
    from benchmarks.registry import all_suites
    from benchmarks.run import Run

    return list(all_suites()[name](Run("cpu", dry=True, peers=peers)))


def test_every_suite_is_listed_and_documented():
    from benchmarks.registry import all_suites

    assert sorted(all_suites()) == sorted([*SUITES, *ALONE])
    assert all(suite.__doc__ for suite in all_suites().values())


@pytest.mark.few(24)
@pytest.mark.parametrize("name", [*SUITES, *ALONE])
def test_suite_without_peers(name):
    if name == "hf_bridge":
        pytest.importorskip("transformers", minversion="5.24")
    records = dry_run(name)
    assert records and len({record.case for record in records}) == len(records)
    assert name in ALONE or all(record.peer is None and record.peer_us is None for record in records)


def test_an_arrival_and_its_end_are_recorded_apart():
    """With their parts; what launches is a part of neither."""
    title = "V3.2, 4 layers, penalties, logprobs"
    assert [re.sub(r"\d+(?=[,)])", "N", record.case.removeprefix(title)) for record in dry_run("arrivals")[:3]] == [
        ": an arrival (submit N, admit N, keep N, start N, begin N, settle N, prefill N)",
        ": its 9 tokens and its end (decode N, deliver N, sweep N, free N)",
        ": a replay, 8 rows",
    ]


def test_loads_are_timed_without_rope_tables(monkeypatch):
    from benchmarks import checkpoints

    timed, load, tables = [], checkpoints.load, []

    def noted(*args, **options):
        spec, params = load(*args, **options)
        tables.append("rope" in params)
        return spec, params

    monkeypatch.setattr(checkpoints, "load", noted)
    monkeypatch.setattr(checkpoints, "_seconds", lambda run, work: timed.append(work()) or 0.0)
    assert dry_run("load")
    repeats = checkpoints.REPEATS
    assert tables == [False] * repeats + [True] and len(timed) == 2 * repeats


@pytest.mark.parametrize("name", SUITES)
def test_suite_beside_peers(name):
    records = dry_run(name, PeersDouble())
    assert records and all(record.peer and record.peer_us is not None for record in records)


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("prefill_v32", "sparse_prefill"), ("prefill_v4", "sparse_prefill"), ("decode_bf16", "sparse_prefill"),
        ("decode_v32", "decode"), ("prefill_scores", "scores"), ("paged_scores", "paged_scores"),
        ("topk_prefill", "top_k_prefill"), ("topk_decode", "top_k_decode"), ("layer_v32", "slots"),
        ("layer_v32", "paged_scores"), ("prefill_chain", "scores"), ("prefill_chain", "sparse_prefill"),
    ],
)  # fmt: skip
def test_a_peer_that_disagrees_is_refused(name, method):
    """The method's queries, keys or scores (or, of slots, its positions) come in another order than ours."""

    def wrong(*inputs, **options):
        at = {"slots": 2, "sparse_prefill": 0, "decode": 0}.get(method, 0)
        inputs = list(inputs)
        inputs[at] = inputs[at].roll(1, 0) if method != "slots" else inputs[at] ^ 1
        return getattr(PeersDouble, method)(peers, *inputs, **options)

    peers = PeersDouble()
    setattr(peers, method, wrong)
    with pytest.raises(AssertionError):
        dry_run(name, peers)


def test_selection_check_allows_near_ties_only():
    from benchmarks.checks import check_selection

    want = torch.arange(256, dtype=torch.int32).repeat(2, 1)
    got = want.clone()
    got[1, -2:] += 2
    check_selection(got, want.flip(1), "selection")
    got[1, -3] = 300
    with pytest.raises(AssertionError, match="a row differs in 3 of 256 keys"):
        check_selection(got, want, "selection")


def test_peers_come_from_the_tree_that_is_named(tmp_path, monkeypatch):
    import sys

    from benchmarks import peers

    monkeypatch.delenv(peers.VARIABLE, raising=False)
    assert peers.load() is None
    monkeypatch.setenv(peers.VARIABLE, str(tmp_path))
    with pytest.raises(ValueError, match="PEERS_DIR: got"):
        peers.load()

    package = tmp_path / "vllm" / "third_party" / "flashmla"
    package.mkdir(parents=True)
    (tmp_path / "vllm" / "__init__.py").write_text("raise ImportError('vLLM itself is not to be imported')")
    (package / "flash_mla_interface.py").write_text("def get_mla_metadata():\n    return 'plan', None\n")
    before = set(sys.modules)
    try:
        assert peers.load().decode_plan() == "plan"
    finally:
        for name in set(sys.modules) - before:
            if name.partition(".")[0] == "vllm":
                del sys.modules[name]


def test_dry_bench_writes_records(tmp_path, monkeypatch, capsys):
    import json

    import bench

    monkeypatch.setattr("sys.argv", ["bench.py", "--dry", "topk_decode", "--json", str(tmp_path / "records.json")])
    assert bench.main() == 0
    records = json.loads((tmp_path / "records.json").read_text())
    assert {record["suite"] for record in records} == {"topk_decode"}
    assert set(records[0]) == {"suite", "case", "us", "peer", "peer_us", "ratio", "floor_us"}


def test_dry_counters(monkeypatch, capsys):
    import counters

    monkeypatch.setattr("sys.argv", ["counters.py", "--dry"])
    assert counters.main() == 0
    names = capsys.readouterr().out.splitlines()
    assert len(set(names)) == len(names) and {name.split()[0].rstrip(",") for name in names} == {
        "decode", "prefill", "scores", "paged", "top-k"
    }  # fmt: skip


def test_bench_goes_on_after_a_suite_that_fails(monkeypatch, capsys):
    import bench
    from benchmarks import registry
    from benchmarks.run import Run

    def broken(run):
        yield registry.Record("first", 1.0)
        raise AssertionError("wrong")

    suites = {"broken": broken, "topk_prefill": registry.all_suites()["topk_prefill"]}
    monkeypatch.setattr(bench, "all_suites", lambda: suites)
    records, failed = bench.measure(list(suites), Run("cpu", dry=True))
    assert failed == ["broken"] and records[0]["case"] == "first" and records[-1]["suite"] == "topk_prefill"


@pytest.mark.parametrize(
    "sets, us, expected", [(4, 3.0, 46), (4, 0.5, 128), (1, 700.0, 1), (256, 12.0, 1), (600, 1.0, 1)]
)
def test_replays_are_long_enough_however_slow_the_host_is(monkeypatch, sets, us, expected):
    """A graph of ``sets`` calls a round, each of ``us`` on the device, where a replay starts and ends in 20."""
    from sparse_attn.testing import timing

    captured = []

    class Graph:
        def replay(self):
            pass

    @contextmanager
    def capture(graph, stream):
        captured.clear()
        yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", capture)
    monkeypatch.setattr(timing, "_elapsed_us", lambda work: 20 + us * len(captured))
    rounds, one, _ = timing._captured([lambda: captured.append(None)] * sets, None)
    assert rounds == expected and one == 20 + us * sets * rounds
    assert one > 0.8 * timing.GRAPH_US or rounds == timing.MOST_CALLS // sets or rounds == 1


def test_kernels_of_a_step_belong_to_its_parts():
    """By their names, as a profiler gives them."""
    from benchmarks.steps import part_of

    kernels = {
        "attention": ("attend", "combine", "paged_mqa_logits", "select_single_cta", "write_rows", "pool", "keep"),
        "experts": ("gate_up", "down", "add_terms", "order_rows", "gather_tokens", "gate_rows", "add_rows"),
        "linears": (
            "swap_ab",
            "place_rows",
            "grouped_linear",
            "nvjet_tst_64x8_64x16",
            "sm90_xmma_gemm_bf16",
        ),
        "rest": ("hyper_mix", "biased_grouped_topk", "void at::native::vectorized_elementwise_kernel<4>", "memcpy"),
    }
    assert {part: tuple(name for name in names if part_of(name) == part) for part, names in kernels.items()} == kernels
