"""The router's second score, sqrt(softplus), and experts that follow from the token id."""

import math

import pytest
import torch
from expecttest import assert_expected_inline

from sparse_attn.ops.layers.router import biased_grouped_topk, hash_routed_experts
from sparse_attn.ops.layers.router.reference import score_of

SHAPES = [(256, 1, 1, 6, "sqrtsoftplus"), (384, 1, 1, 6, "sqrtsoftplus"), (256, 8, 4, 8, "sigmoid")]  # as shipped
ARGUMENTS = dict(score="sqrtsoftplus", routed_scale=1.5)
EXTREMES = torch.tensor([-300.0, -90.0, -30.0, -17.0, -16.5, -9.0, -1e-30, 0.0, 1e-3, 3.0, 19.0, 21.0, 80.0, 1e30])


def gate_of(kind, experts=8, top_k=3, hidden=16, vocabulary=11):
    """transformers' own router with random weights."""
    from transformers import DeepseekV4Config
    from transformers.models.deepseek_v4 import modeling_deepseek_v4 as theirs

    config = DeepseekV4Config(
        hidden_size=hidden, n_routed_experts=experts, num_experts_per_tok=top_k, vocab_size=vocabulary,
        num_hidden_layers=1, layer_types=["sliding_attention"], mlp_layer_types=["moe"],
    )  # fmt: skip
    gate = getattr(theirs, kind)(config)
    generator = torch.Generator().manual_seed(7)
    gate.weight.data = torch.randn(experts, hidden, generator=generator)
    return gate, generator


def test_scores_at_the_extremes():
    got = score_of(EXTREMES, "sqrtsoftplus").double()
    want = [math.sqrt(x + math.log1p(math.exp(-x)) if x > 0 else math.log1p(math.exp(x))) for x in EXTREMES.tolist()]
    torch.testing.assert_close(got, torch.tensor(want, dtype=torch.float64), rtol=1e-6, atol=1e-20)


def test_transformers_top_k_router():
    gate, generator = gate_of("DeepseekV4TopKRouter")
    gate.e_score_correction_bias = torch.randn(8, generator=generator)
    hidden = torch.randn(40, 16, generator=generator)
    logits, want, want_ids = gate(hidden)
    weights, ids = biased_grouped_topk(
        logits, gate.e_score_correction_bias, top_k=3, num_groups=1, top_groups=1, **ARGUMENTS
    )
    order, want_order = ids.argsort(1), want_ids.argsort(1)
    assert torch.equal(ids.gather(1, order).long(), want_ids.gather(1, want_order))
    torch.testing.assert_close(weights.gather(1, order), want.gather(1, want_order))


def test_fp16_logits_are_scored_as_fp32():
    logits = torch.randn(5, 6).half()
    table, tokens = torch.arange(10).reshape(5, 2) % 6, torch.arange(5)
    want = hash_routed_experts(logits.float(), tokens, table, **ARGUMENTS)
    assert all(map(torch.equal, hash_routed_experts(logits, tokens, table, **ARGUMENTS), want))


def test_transformers_hash_router():
    gate, generator = gate_of("DeepseekV4HashRouter")
    gate.tid2eid = torch.randint(0, 8, (11, 3), generator=generator)
    tokens = torch.randint(0, 11, (40,), generator=generator)
    logits, want, want_ids = gate(torch.randn(40, 16, generator=generator), tokens)
    for table in (gate.tid2eid, gate.tid2eid.int()):
        weights, ids = hash_routed_experts(logits, tokens.int(), table, **ARGUMENTS)
        assert torch.equal(ids.long(), want_ids) and ids.dtype == torch.int32
        torch.testing.assert_close(weights, want)


def test_ids_outside_the_table_weigh_nothing():
    logits = torch.tensor([[0.0, 1.0, 2.0]]).expand(5, 3)
    table = torch.tensor([[2, 0], [1, 3], [-1, 1]])
    weights, ids = hash_routed_experts(logits, torch.tensor([0, 1, 2, 3, -1]), table, renormalise=False, **ARGUMENTS)
    shown = "\n".join(f"{i} {[round(x, 3) for x in w]}" for i, w in zip(ids.tolist(), weights.tolist()))
    assert_expected_inline(
        shown,
        """\
[2, 0] [2.188, 1.249]
[1, 0] [1.719, 0.0]
[0, 1] [0.0, 1.719]
[0, 0] [0.0, 0.0]
[0, 0] [0.0, 0.0]""",
    )
    weights, ids = hash_routed_experts(logits[:0], torch.zeros(0, dtype=torch.int64), table)
    assert weights.shape == ids.shape == (0, 2)


LOGITS, TOKENS, TABLE = torch.zeros(4, 6), torch.zeros(4, dtype=torch.int64), torch.zeros(9, 2, dtype=torch.int32)


@pytest.mark.parametrize(
    "change, error, message",
    [
        (dict(logits=LOGITS.double()), TypeError, "logits: got dtype float64"),
        (dict(tokens=TOKENS.float()), TypeError, "tokens: got dtype float32"),
        (dict(tokens=TOKENS[:2]), ValueError, "tokens: got shape"),
        (dict(table=TABLE[:0]), ValueError, "table vocabulary: got 0"),
        (dict(table=TABLE[0]), ValueError, "table: got 1 dimensions"),
        (dict(table=TABLE.to("meta")), ValueError, "table: got device meta"),
        (dict(score="relu"), ValueError, "score: got 'relu'"),
        (dict(impl="cuda"), ValueError, "impl: got 'cuda'"),
    ],
)
def test_hash_errors(change, error, message):
    arguments = dict(logits=LOGITS, tokens=TOKENS, table=TABLE) | change
    with pytest.raises(error, match=message):
        hash_routed_experts(arguments.pop("logits"), arguments.pop("tokens"), arguments.pop("table"), **arguments)


def test_traces_without_breaks_or_recompiles():
    def step(logits, bias, tokens, table):
        chosen = biased_grouped_topk(logits, bias, top_k=3, num_groups=1, top_groups=1, **ARGUMENTS)
        return *chosen, *hash_routed_experts(logits, tokens, table, **ARGUMENTS)

    compiled = torch.compile(step, fullgraph=True, dynamic=True, backend="aot_eager")
    for count in (3, 5, 9):
        given = torch.randn(count, 6), torch.randn(6), torch.arange(count), torch.arange(14).reshape(7, 2) % 6
        with torch.compiler.set_stance("default" if count < 9 else "fail_on_recompile"):
            got = compiled(*given)
        assert all(map(torch.equal, got, step(*given)))


def test_other_experts_and_other_tokens_do_not_matter():
    """NaN where the table does not look, and in a row whose id is no token; views of any strides."""
    logits = torch.randn(6, 4).mT.repeat(2, 1)[::2]  # [4, 6]
    table = torch.stack([torch.tensor([[0, 3], [5, 0]]), torch.full((2, 2), 2**40)], 2)[..., 0]
    tokens = torch.stack([torch.tensor([0, 1, 2, -(2**63)]), torch.full((4,), -1)], 1)[:, 0]
    want = hash_routed_experts(logits.contiguous(), tokens.contiguous(), table.contiguous(), **ARGUMENTS)
    poisoned = torch.full_like(logits, math.nan)
    for row in (0, 1):
        poisoned[row, table[row]] = logits[row, table[row]]
    got = hash_routed_experts(poisoned, tokens, table, **ARGUMENTS)
    assert all(map(torch.equal, got, want)) and not got[0][2:].any()


@pytest.mark.kernel
def test_kernel_nan_and_infinities(device):
    logits, bias = torch.randn(6, 8), torch.zeros(8)
    logits[0, ::2], logits[1], logits[2], logits[3, 2] = math.nan, math.nan, -math.inf, -math.inf
    bias[1], bias[7] = math.nan, -math.inf
    for renormalise in (True, False):
        arguments = dict(top_k=5, num_groups=1, top_groups=1, renormalise=renormalise, **ARGUMENTS)
        want, want_ids = biased_grouped_topk(logits, bias, impl="reference", **arguments)
        got, ids = biased_grouped_topk(logits.to(device), bias.to(device), impl="triton", **arguments)
        assert torch.equal(ids.cpu(), want_ids) and want.isfinite().all() and not want[1:3].any()
        torch.testing.assert_close(got.cpu(), want, atol=1e-7, rtol=3e-6)


@pytest.mark.kernel
@pytest.mark.parametrize("experts, top_k", [(8, 3), (6, 6), (48, 5)])
def test_kernel_matches_reference(device, experts, top_k):
    generator = torch.Generator().manual_seed(experts)
    logits = torch.randn(9, experts, generator=generator) * 8
    logits[0, :6] = EXTREMES[:6]
    logits[1, :6] = EXTREMES[-6:]
    bias = torch.randn(experts, generator=generator) * 0.3
    arguments = dict(top_k=top_k, num_groups=1, top_groups=1, **ARGUMENTS)
    want, want_ids = biased_grouped_topk(logits, bias, impl="reference", **arguments)
    got, ids = (x.cpu() for x in biased_grouped_topk(logits.to(device), bias.to(device), impl="triton", **arguments))
    assert torch.equal(ids, want_ids)
    torch.testing.assert_close(got, want, atol=1e-7, rtol=3e-6)
