"""Call sites of FlashMLA, DeepGEMM and vLLM under torch.compile, in captured graphs, and what they launch."""

import pytest
import torch
from support.field_formats import attention, first, fp8, latent_bytes, within_rounding

from sparse_attn.framework.torch_private import TorchDispatchMode, schema
from sparse_attn.integrations import deep_gemm, flash_mla, vllm_ops


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


def call_decode(q, cache, indices, length, out=None):
    return flash_mla.flash_mla_with_kvcache(
        q, cache, None, None, 512, flash_mla.get_mla_metadata()[0], is_fp8_kvcache=True, indices=indices,
        topk_length=length, out=out,
    )  # fmt: skip


def test_compiled_without_a_break():
    """One graph, and the same bits as eager; sizes that change, and starts of rows that are not baked in."""
    cache = latent_bytes(torch.randn(8, 576))[0].view(2, 4, 1, 656)
    compiled = torch.compile(call_decode, fullgraph=True, dynamic=True, backend="eager")
    for batch in (3, 5):
        q = torch.randn(batch, 1, 3, 576).bfloat16()
        indices = torch.randint(-1, 8, (batch, 1, 6), dtype=torch.int32)
        for got, expected in zip(compiled(q, cache, indices, None), call_decode(q, cache, indices, None)):
            torch.testing.assert_close(got, expected, rtol=0, atol=0)


def compiled_calls(device="cpu"):
    """name -> (function of tensors, their sizes' number -> tensors); what is written is among what is returned."""

    def there(*tensors):
        return tuple(tensor.to(device) for tensor in tensors)

    def ints(*shape, most):
        return torch.randint(0, most, shape, dtype=torch.int32)

    def decode_lengths(q, cache, indices, lengths, out):
        return call_decode(q, cache, indices, lengths, out)

    def prefill(q, kv, indices, lengths):
        return flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.1, topk_length=lengths)

    def rows_of_scores(q, k, k_scale, weights, start, end):
        return deep_gemm.fp8_mqa_logits(q, (k, k_scale), weights, start, end, max_seqlen_k=5)

    def paged(q, cache, weights, lens, table):
        plan = deep_gemm.get_paged_mqa_logits_metadata(lens, 64, 3)
        return deep_gemm.fp8_fp4_paged_mqa_logits((q, None), cache, weights, lens, table, plan, 64, False)

    def top_k(logits, lens):
        chosen = torch.full((logits.shape[0], 4), -7, dtype=torch.int32, device=logits.device)
        vllm_ops.top_k_per_row_decode(logits, 1, lens, chosen, logits.shape[0], *logits.stride(), 4)
        vllm_ops.top_k_per_row_prefill(
            logits, torch.zeros_like(lens), lens, chosen, logits.shape[0], *logits.stride(), 3
        )
        return chosen

    def cached(k, slots, table, ends):
        cache = torch.zeros(2, 64, 132, dtype=torch.uint8, device=k.device)
        vllm_ops.indexer_k_quant_and_cache(k, cache, slots, 128, "ue8m0")
        keys, scales = k.new_zeros(8, 128, dtype=torch.uint8), k.new_zeros(8, 4, dtype=torch.uint8)
        vllm_ops.cp_gather_indexer_k_quant_cache(cache, keys, scales, table, ends)
        return cache, keys, scales

    cache = latent_bytes(torch.randn(128, 576))[0].view(2, 64, 1, 656)
    index_cache = torch.zeros(2, 64 * 132, dtype=torch.uint8)
    index_cache[:, : 64 * 128] = fp8(2, 64 * 128).view(torch.uint8)
    index_cache[:, 64 * 128 :] = torch.rand(2, 64).view(torch.uint8)
    index_cache = index_cache.view(2, 64, 1, 132)
    return {
        "decode": (decode_lengths, lambda n: there(
            torch.randn(n, 1, 3, 576).bfloat16(), cache, ints(n, 1, 6, most=128), ints(n, most=7),
            torch.zeros(n, 1, 3, 512).bfloat16())),
        "prefill": (prefill, lambda n: there(
            torch.randn(n, 3, 576).bfloat16(), torch.randn(20, 1, 576).bfloat16(), ints(n, 1, 9, most=20),
            ints(n, most=10))),
        "scores": (rows_of_scores, lambda n: there(
            fp8(n, 3, 128), fp8(11, 128), torch.rand(11), torch.rand(n, 3), ints(n, most=5), 5 + ints(n, most=6))),
        "paged scores": (paged, lambda n: there(
            fp8(n, 1, 3, 128), index_cache, torch.rand(n, 3), ints(n, 1, most=64), ints(n, 1, most=2))),
        "top-k": (top_k, lambda n: there(torch.randn(n, 16), ints(n, most=17))),
        "index cache": (cached, lambda n: there(
            torch.randn(n, 128).bfloat16(), torch.arange(n, dtype=torch.int64) * 3,
            torch.tensor([[0]], dtype=torch.int32), torch.tensor([0, 8], dtype=torch.int32))),
    }  # fmt: skip


CALLS = ("decode", "prefill", "scores", "paged scores", "top-k", "index cache")


@pytest.mark.few(3)
@pytest.mark.parametrize("name", CALLS)
def test_every_function_compiles_without_a_break(name):
    """One graph for sizes that change, and the same bits as eager."""
    call, tensors = compiled_calls()[name]
    compiled = torch.compile(call, fullgraph=True, dynamic=True, backend="aot_eager")
    for size in (3, 5):
        given = tensors(size)
        torch.testing.assert_close(compiled(*given), call(*given), rtol=0, atol=0)


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_every_function_in_a_captured_graph(name):
    call, tensors = compiled_calls("cuda")[name]
    first, second = tensors(5), tensors(5)
    call(*first)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = call(*first)
    for mine, other in zip(first, second):
        mine.copy_(other)
    graph.replay()
    torch.testing.assert_close(got, call(*second), rtol=0, atol=0)


class Launches(TorchDispatchMode):
    """Names of the operators that are called, views and allocations left out."""

    FREE = (
        "view",
        "squeeze",
        "unsqueeze",
        "transpose",
        "slice",
        "expand",
        "alias",
        "_unsafe_view",
        "empty",
        "new_empty",
        "empty_like",
        "detach",
    )

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = schema(func).name
        if name.split("::")[1] not in self.FREE:
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("length", (False, True))
@pytest.mark.parametrize("given", (False, True))
def test_a_decode_call_launches_attention_alone(length, given):
    cache = latent_bytes(torch.randn(8, 576))[0].view(2, 4, 1, 656)
    q, indices = torch.randn(2, 1, 3, 576).bfloat16(), torch.zeros(2, 1, 4, dtype=torch.int32)
    lengths = torch.ones(2, dtype=torch.int32) if length else None
    out = torch.empty(2, 1, 3, 512).bfloat16() if given else None
    call_decode(q, cache, indices, lengths, out)
    with Launches() as seen:
        call_decode(q, cache, indices, lengths, out)
    assert [name for name in seen.names if "sparse_attn" in name] == ["sparse_attn::sparse_attn_into"]
    assert seen.names[0] == "sparse_attn::sparse_attn_into"  # behind it stands what the reference does inside


@pytest.mark.gpu
@pytest.mark.parametrize("heads", (3, 64, 128))
@pytest.mark.parametrize("length", (False, True))
def test_decode_on_a_gpu_in_a_captured_graph(heads, length):
    records, meant = latent_bytes(torch.randn(128, 576))
    cache = records.view(2, 64, 1, 656).cuda()
    q = torch.randn(4, 1, heads, 576).bfloat16().cuda()
    indices = torch.randint(-1, 128, (4, 1, 64), dtype=torch.int32)
    indices[3] = -1
    lengths = [64, 0, 17, 5] if length else None
    on_gpu = None if lengths is None else torch.tensor(lengths, dtype=torch.int32, device="cuda")
    given = indices.cuda()
    call_decode(q, cache, given, on_gpu)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, lse = call_decode(q, cache, given, on_gpu)
    graph.replay()
    torch.cuda.synchronize()
    expected = attention(q[:, 0].cpu(), [(meant, first(indices[:, 0], lengths))], 576**-0.5, 512)
    within_rounding(out[:, 0].cpu(), expected)
    torch.testing.assert_close(lse[..., 0].cpu().double(), expected[2], rtol=1e-3, atol=1e-3)
