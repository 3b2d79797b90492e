"""Router: the reference against plain Python and transformers, the kernel against the reference."""

from __future__ import annotations

import math

import pytest
import torch
from expecttest import assert_expected_inline

from sparse_attn.ops.layers.router import biased_grouped_topk, reference
from sparse_attn.testing.ops import opcheck, schema

NAN, INF = float("nan"), float("inf")
# experts, groups, kept groups, top_k
SHAPES = [
    (16, 4, 2, 3),
    (256, 8, 4, 8),
    (384, 1, 1, 6),
    (5, 1, 1, 5),
    (1, 1, 1, 1),
    (30, 5, 3, 7),
    (12, 6, 1, 2),
    (18, 3, 3, 4),
    (1024, 16, 5, 9),
]


def slow_route(logits, bias, top_k, num_groups, top_groups, renormalise, routed_scale):
    """One token in plain Python; biased sums are taken in fp32 so that ties are the same ties."""
    scores = torch.sigmoid(torch.tensor(logits, dtype=torch.float32)).tolist()
    biased = (torch.tensor(scores) + torch.tensor(bias)).tolist()
    biased = [-INF if math.isnan(value) else value for value in biased]
    size = len(biased) // num_groups
    if top_groups < num_groups:
        rank = []
        for g in range(num_groups):
            two = sorted(biased[g * size : (g + 1) * size])[-2:]
            total = float(torch.tensor(two[1]) + torch.tensor(two[0]))
            rank.append((INF if math.isnan(total) else -total, g))
        kept = {g for _, g in sorted(rank)[:top_groups]}
        biased = [value if i // size in kept else -INF for i, value in enumerate(biased)]
    ids = sorted(range(len(biased)), key=lambda i: (-biased[i], i))[:top_k]
    weights = [scores[i] if biased[i] > -INF else 0.0 for i in ids]
    total = sum(weights)
    if renormalise and total:
        weights = [w / total for w in weights]
    return [w * routed_scale for w in weights], ids


def inputs(tokens, experts, *, ties=False, seed=0, dtype=torch.float32, device="cpu"):
    """Non-contiguous logits and bias; with ``ties`` both come from few values, all logits of one sign."""
    generator = torch.Generator().manual_seed(seed)
    if ties:
        logits = torch.randint(1, 4, (tokens, 2 * experts), generator=generator) / 4
        bias = torch.randint(-1, 2, (2 * experts,), generator=generator).float()
    else:
        logits = torch.randn(tokens, 2 * experts, generator=generator)
        bias = torch.randn(2 * experts, generator=generator) * 0.3 - 0.5
    return logits.to(dtype).to(device)[:, ::2], bias.to(device)[::2]


def check_against_python(logits, bias, *rest):
    weights, ids = reference.biased_grouped_topk(logits, bias, *rest, "sigmoid")
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32
    for t, row in enumerate(logits.float().tolist()):
        want_weights, want_ids = slow_route(row, bias.tolist(), *rest)
        assert ids[t].tolist() == want_ids
        torch.testing.assert_close(weights[t], torch.tensor(want_weights), atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("experts, groups, kept, top_k", SHAPES)
def test_reference_matches_python(experts, groups, kept, top_k, ties):
    logits, bias = inputs(6, experts, ties=ties)
    check_against_python(logits, bias, top_k, groups, kept, True, 2.5)
    check_against_python(logits, bias, top_k, groups, kept, False, 1.5)
    check_against_python(logits.bfloat16(), bias, top_k, groups, kept, True, 1.0)
    check_against_python(logits.half(), bias, top_k, groups, kept, True, 1.0)


def poisoned(device="cpu"):
    """NaN and infinities in every place that decides something: experts, groups, whole rows, bias."""
    logits, bias = inputs(7, 16, seed=3)
    logits = logits.clone()
    logits[0, ::2] = NAN
    logits[1] = NAN
    logits[2, :15] = NAN
    logits[3, 4:8] = INF
    logits[4] = -INF
    logits[5, [0, 5, 10, 15]] = -NAN
    bias = bias.clone()
    bias[3], bias[8] = NAN, -INF
    return logits.to(device), bias.to(device)


def test_reference_nan_and_infinities():
    logits, bias = poisoned()
    check_against_python(logits, bias, 6, 4, 2, True, 2.5)
    weights, ids = biased_grouped_topk(logits, bias, top_k=6, num_groups=4, top_groups=2)
    assert weights.isfinite().all() and all(len(set(row)) == 6 for row in ids.tolist())
    assert not weights[1].any() and ids[1].tolist() == [0, 1, 2, 3, 4, 5]
    assert not weights[4].any()


def test_dropped_groups_lose_to_negative_biased_scores():
    """With 0 instead of -inf for dropped groups, experts 2 and 3 would win."""
    logits = torch.tensor([[0.0, 0.0, -9.0, -9.0]])
    bias = torch.tensor([-1.0, -1.0, -2.0, -2.0])
    _, ids = biased_grouped_topk(logits, bias, top_k=2, num_groups=2, top_groups=1)
    assert ids.tolist() == [[0, 1]]


def test_scores_are_taken_in_fp32():
    """In bf16 both sigmoids round to the same number and the lower id would win."""
    logits = torch.tensor([[4.0, 4.03125]], dtype=torch.bfloat16)
    _, ids = biased_grouped_topk(logits, torch.zeros(2), top_k=1, num_groups=1, top_groups=1)
    assert ids.item() == 1


def test_golden():
    logits = torch.tensor([[1.0, -1.0, 0.5, 2.0, 0.0, 0.0, 3.0, -3.0]])
    bias = torch.tensor([0.0, 1.0, 0.0, 0.0, 0.25, 0.25, -1.0, 0.0])
    weights, ids = biased_grouped_topk(logits, bias, top_k=3, num_groups=4, top_groups=2, routed_scale=2.5)
    shown = f"{ids.tolist()} {[f'{w:.5f}' for w in weights[0].tolist()]}"
    assert_expected_inline(shown, """[[1, 3, 0]] ['0.35748', '1.17078', '0.97174']""")


def test_matches_transformers():
    pytest.importorskip("transformers")
    from transformers import DeepseekV32Config
    from transformers.models.deepseek_v32 import modeling_deepseek_v32 as modeling

    config = DeepseekV32Config(
        hidden_size=32, n_routed_experts=32, num_experts_per_tok=4, n_group=8, topk_group=3, routed_scaling_factor=2.5,
        norm_topk_prob=True,
    )  # fmt: skip
    gate = modeling.DeepseekV32TopkRouter(config).requires_grad_(False)
    logits, bias = inputs(9, 32, seed=4)
    gate.weight.copy_(torch.eye(32))
    gate.e_score_correction_bias.copy_(bias)
    _, want_weights, want_ids = gate(logits)
    weights, ids = biased_grouped_topk(logits, bias, top_k=4, num_groups=8, top_groups=3, routed_scale=2.5)
    order, want_order = ids.argsort(1), want_ids.argsort(1)
    assert torch.equal(ids.gather(1, order).long(), want_ids.gather(1, want_order))
    torch.testing.assert_close(weights.gather(1, order), want_weights.gather(1, want_order))


def test_schema():
    assert_expected_inline(
        schema("biased_grouped_topk").replace(", ", ",\n"),
        """\
sparse_attn::biased_grouped_topk(Tensor logits,
Tensor bias,
int top_k,
int num_groups,
int top_groups,
bool renormalise,
float routed_scale,
str score,
str impl) -> (Tensor,
Tensor)""",
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_opcheck(dtype):
    logits, bias = inputs(5, 16, dtype=dtype)
    opcheck("biased_grouped_topk", logits, bias, 3, 4, 2, True, 2.5, "sigmoid", "auto")
    opcheck("biased_grouped_topk", logits[:0], bias, 3, 1, 1, False, 1.0, "sqrtsoftplus", "reference")
    by_expert = logits.t().contiguous().t()
    for groups, kept in ((4, 2), (1, 1)):
        opcheck("biased_grouped_topk", by_expert, bias, 3, groups, kept, True, 2.5, "sigmoid", "auto")


def test_empty():
    weights, ids = biased_grouped_topk(torch.empty(0, 8), torch.zeros(8), top_k=2, num_groups=2, top_groups=1)
    assert weights.shape == ids.shape == (0, 2) and (weights.dtype, ids.dtype) == (torch.float32, torch.int32)


def test_traces_without_breaks_or_recompiles():
    def step(logits, bias):
        return biased_grouped_topk(logits, bias, top_k=3, num_groups=4, top_groups=2)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (3, 5, 9):
        logits, bias = inputs(tokens, 16)
        logits, bias = logits.contiguous(), bias.contiguous()
        with torch.compiler.set_stance("default" if tokens < 9 else "fail_on_recompile"):
            got = compiled(logits, bias)
        assert all(map(torch.equal, got, step(logits, bias)))


L, B = torch.zeros(3, 12), torch.zeros(12)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(logits=L.double()), TypeError, "logits: got dtype float64"),
        (dict(logits=L[0]), ValueError, "logits: got 1 dimensions"),
        (dict(bias=B.bfloat16()), TypeError, "bias: got dtype bfloat16"),
        (dict(bias=B[:4]), ValueError, "bias: got shape"),
        (dict(bias=B.to("meta")), ValueError, "bias: got device meta"),
        (dict(logits=L[:, :0], bias=B[:0]), ValueError, "logits: got 0 experts"),
        (dict(logits=torch.zeros(1, 1025), bias=torch.zeros(1025)), ValueError, "logits: got 1025"),
        (dict(num_groups=5), ValueError, "num_groups: got 5"),
        (dict(num_groups=12), ValueError, "num_groups: got 12"),
        (dict(num_groups=0), ValueError, "num_groups: got 0"),
        (dict(top_groups=0), ValueError, "top_groups: got 0"),
        (dict(top_groups=5), ValueError, "top_groups: got 5, allowed: 1 to 4"),
        (dict(top_k=0), ValueError, "top_k: got 0"),
        (dict(top_k=7), ValueError, "top_k: got 7, allowed: 1 to 6"),
        (dict(score="softmax"), ValueError, "score: got 'softmax', allowed: 'sigmoid', 'sqrtsoftplus'"),
        (dict(impl="cuda"), ValueError, "impl: got 'cuda'"),
    ],
)
def test_errors(change, error, message):
    arguments = dict(logits=L, bias=B, top_k=2, num_groups=4, top_groups=2) | change
    with pytest.raises(error, match=message):
        biased_grouped_topk(arguments.pop("logits"), arguments.pop("bias"), **arguments)


def check_kernel(logits, bias, top_k, groups, kept, renormalise=True, scale=2.5, allowed=0.0):
    """Ids equal but for ``allowed`` of the rows (scores closer than the sigmoid's rounding), weights close."""
    arguments = dict(top_k=top_k, num_groups=groups, top_groups=kept, renormalise=renormalise, routed_scale=scale)
    want_weights, want_ids = biased_grouped_topk(logits.cpu(), bias.cpu(), impl="reference", **arguments)
    weights, ids = (out.cpu() for out in biased_grouped_topk(logits, bias, impl="triton", **arguments))
    same = (ids == want_ids).all(1)
    assert (~same).float().mean() <= allowed, f"ids differ in rows {(~same).nonzero().flatten()[:4]}"
    torch.testing.assert_close(weights[same], want_weights[same], atol=1e-6, rtol=2e-6)


@pytest.mark.kernel
@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("experts, groups, kept, top_k", SHAPES)
def test_kernel_matches_reference(device, experts, groups, kept, top_k, ties):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        check_kernel(*inputs(9, experts, ties=ties, dtype=dtype, device=device), top_k, groups, kept)
    check_kernel(*inputs(3, experts, ties=ties, device=device), top_k, groups, kept, False, 1.0)
    if device.type == "cuda":
        big = inputs(5000, experts, device=device, seed=1)
        check_kernel(*big, top_k, groups, kept, allowed=2e-3)


@pytest.mark.kernel
def test_kernel_nan_infinities_and_empty(device):
    logits, bias = poisoned(device)
    for groups, kept in ((4, 2), (1, 1), (8, 3), (4, 4)):
        check_kernel(logits, bias, 6, groups, kept)
    weights, ids = biased_grouped_topk(logits[:0], bias, top_k=3, num_groups=4, top_groups=2, impl="triton")
    assert weights.shape == ids.shape == (0, 3)
