"""The same bits: over repeats, over a row's place in the batch, in eager, compiled and replayed form, in another
process."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.repeatable_ops import ROWS, digest, operators

from sparse_attn import (
    LatentFp8Layout,
    PlainLayout,
    PlanarFp8Layout,
    Ragged,
    allocate_cache,
    sparse_attn_decode,
    sparse_attn_prefill,
)

TESTS = Path(__file__).parents[1]
NAMES = tuple(operators("cpu"))
EAGER_MATMUL = ("hyper_mix",)  # begins with a matrix product, which is the library's of the machine
INVARIANT = tuple(name for name in NAMES if name not in EAGER_MATMUL)


def same(got, want):
    return all(torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(got, want, strict=True))


def check_repeats(name, device, repeats):
    function, order = operators(device)[name], torch.arange(ROWS, device=device)
    want = function(order)
    assert all(same(function(order), want) for _ in range(repeats))


def check_places(name, device):
    function = operators(device)[name]
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(3)).to(device)
    want = function(torch.arange(ROWS, device=device))
    assert same([x.contiguous() for x in function(order)], [x[order].contiguous() for x in want])


def check_process(device):
    paths = [str(TESTS), str(TESTS.parent), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    command = [sys.executable, "-m", "support.repeatable_ops", device]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    theirs = dict(line.split("\t") for line in done.stdout.splitlines())
    order = torch.arange(ROWS, device=device)
    assert theirs == {name: digest(function(order)) for name, function in operators(device).items()}


@pytest.mark.parametrize("name", NAMES)
def test_reference_repeats(name):
    check_repeats(name, "cpu", 3)


@pytest.mark.parametrize("name", ["index_topk_decode", "top_k_per_row", "biased_grouped_topk", "indexer_q_rope_quant"])
def test_reference_gives_a_row_the_same_wherever_it_stands(name):
    check_places(name, "cpu")


def test_another_process_gives_the_same():
    check_process("cpu")


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_kernels_repeat(name):
    check_repeats(name, "cuda", 100)


@pytest.mark.gpu
@pytest.mark.parametrize("name", INVARIANT)
def test_kernels_give_a_row_the_same_wherever_it_stands(name):
    check_places(name, "cuda")


@pytest.mark.gpu
def test_another_process_gives_the_same_on_the_gpu():
    check_process("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_compiled_and_replayed_give_the_same(name):
    function, order = operators("cuda")[name], torch.arange(ROWS, device="cuda")
    want = function(order)
    torch.compiler.reset()
    if name in INVARIANT:
        assert same(torch.compile(function, fullgraph=True)(order), want)
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function(order)
        with torch.cuda.graph(graph, stream=stream):
            got = function(order)
    for _ in range(3):
        graph.replay()
        torch.cuda.synchronize()
        assert same(got, want)


def check_batches(layout, heads, top_k, sizes, device, two=False):
    """Rows of the largest batch against the same rows in smaller ones; top_k / 2 more of a second cache."""
    torch.manual_seed(5)
    most = max(sizes)
    cache = allocate_cache(layout, 9, 16, device)
    layout.encode(cache, torch.arange(144, device=device), torch.randn(144, layout.dim, device=device))
    dense = torch.randint(-20, 144, (most, top_k), dtype=torch.int32, device=device)
    q = torch.randn(most, heads, layout.dim, device=device).bfloat16()

    def attend(some):
        def rows(width):
            indptr = torch.arange(some.stop - some.start + 1, dtype=torch.int32, device=device) * width
            return Ragged(dense[some, :width].flatten(), indptr)

        more = dict(extra_cache=cache, extra_ragged=rows(top_k // 2), extra_layout=layout) if two else {}
        options = dict(scale=0.1, layout=layout, batch_invariant=True, impl="triton")
        return sparse_attn_decode(q[some], cache, rows(top_k), **more, **options)

    check_parts(attend, sizes)


def check_parts(attend, sizes):
    """``attend`` of the last rows of the largest of ``sizes``, however many, against them among all rows."""
    most = max(sizes)
    whole = attend(slice(0, most))
    for size in sizes:
        first = most - size
        assert same(attend(slice(first, most)), [part[first:].contiguous() for part in whole])


def check_prefills(heads, d_qk, d_v, top_k, sizes, device):
    generator = torch.Generator().manual_seed(5)
    most = max(sizes)
    dense = torch.randint(-20, 144, (most, top_k), dtype=torch.int32, generator=generator).to(device)
    q = torch.randn(most, heads, d_qk, generator=generator).to(device, torch.bfloat16)
    kv = torch.randn(144, d_qk, generator=generator).to(device, torch.bfloat16)

    def attend(some):
        indptr = torch.arange(some.stop - some.start + 1, dtype=torch.int32, device=device) * top_k
        rows = Ragged(dense[some].flatten(), indptr)
        return sparse_attn_prefill(q[some], kv, rows, scale=0.1, d_v=d_v, batch_invariant=True, impl="triton")

    check_parts(attend, sizes)


@pytest.mark.kernel
def test_batch_invariant_prefill_rows(device):
    check_prefills(3, 40, 32, 140, (1, 3, 40 if device.type == "cuda" else 5), device)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 64, 96, 128])
@pytest.mark.parametrize("d_qk, d_v", [(576, 512), (512, 512), (192, 128)])
def test_batch_invariant_prefill_rows_of_every_kernel(d_qk, d_v, heads):
    check_prefills(heads, d_qk, d_v, 1024, (1, 2, 20, 70, 140, 600), "cuda")


@pytest.mark.kernel
def test_batch_invariant_rows(device):
    check_batches(LatentFp8Layout(32, 8, 16), 3, 70, (1, 3, 40 if device.type == "cuda" else 5), device)


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [16, 64, 96, 128])
@pytest.mark.parametrize("layout", [LatentFp8Layout(512, 64), PlanarFp8Layout(448, 64), PlainLayout("bf16", 512, 64)])
def test_batch_invariant_rows_of_every_kernel(layout, heads):
    check_batches(layout, heads, 1024, (1, 2, 20, 70, 140), "cuda", isinstance(layout, PlanarFp8Layout))
