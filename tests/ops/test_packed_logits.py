"""Logits of packed models against the same weights, dequantised by an oracle in fp64 and held in fp32."""

from __future__ import annotations

import pytest
import torch

from sparse_attn import Model, generate
from sparse_attn.checkpoints.load import load
from sparse_attn.checkpoints.published import write_published
from sparse_attn.cli.main import main
from sparse_attn.pipeline import cache_layouts
from sparse_attn.spec import preset
from sparse_attn.weight_layout import PackedWeight

PROMPT = [list(range(3, 3 + 43))]
CASES = [("tiny_v32", "published"), ("tiny_v32", "fp8-e8m0"), ("tiny_v32", "fused"), ("tiny_v32", "bf16"),
         ("tiny_glm5", "published"), ("tiny_glm5", "fp8-e8m0"), ("tiny_glm5", "fused"), ("tiny_glm5", "bf16"), ("tiny_v4", "published"), ("tiny_v4", "flash-base"),
         ("tiny_v4", "fp8-e8m0"), ("tiny_v4", "fused"), ("tiny_v4", "bf16")]  # fmt: skip
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def values(weight):
    """fp64, by tables: a code's sign, exponent and mantissa; a scale byte's power; blocks by their names."""
    codes, block, kind, *_ = weight.layout.split("/")
    rows, columns = map(int, block.split("x"))
    raw = weight.codes.view(torch.uint8)
    if codes == "e2m1":
        table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64)
        number = torch.stack([table[(raw % 16).long()], table[(raw // 16).long()]], -1).flatten(-2)
    else:
        exponent, mantissa = (raw // 8 % 16).double(), (raw % 8).double()
        normal = torch.pow(2.0, exponent - 7) * (1 + mantissa / 8)
        number = torch.where(exponent == 0, mantissa * 2.0**-9, normal) * (1 - 2 * (raw // 128).double())
    scale = weight.scales.double() if kind == "fp32" else torch.pow(2.0, weight.scales.double() - 127)
    wide = scale.repeat_interleave(rows, -2)[..., : number.shape[-2], :]
    return number * wide.repeat_interleave(columns, -1)[..., : number.shape[-1]]


def logits_of(spec, params):
    model = Model(spec, params, cache_layouts(spec, "fp32"))
    return generate(model, PROMPT, max_new_tokens=2, keep_logits=True, prefill_tokens=17).logits[0]


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name,form", CASES)
def test_a_packed_model_computes_with_the_values_of_its_files(name, form, tmp_path):
    """Products round sums in fp32 in another order, which is what may differ: 2e-5 of the largest logit."""
    write_published(tmp_path / "out", preset(name), form, seed=1)
    spec, packed = load(tmp_path / "out", dtype=torch.float32)
    wide = {
        key: values(weight).float() if isinstance(weight, PackedWeight) else weight for key, weight in packed.items()
    }
    assert any(isinstance(weight, PackedWeight) for weight in packed.values()) == (form != "bf16")
    got, want = logits_of(spec, packed), logits_of(spec, wide)
    assert got.isfinite().all() and (got - want).abs().max() <= 2e-5 * want.abs().max()


def test_the_command_line_keeps_weights_packed(tmp_path, capsys):
    from safetensors.torch import load_file

    write_published(tmp_path / "out", preset("tiny_v4"), "published", seed=1)
    found = []
    for more in ([], ["--expand-weights"]):
        run = ["generate", "--model", str(tmp_path / "out"), "--prompt-ids", "5,6,7", "--max-new-tokens", "2", "--device", "cpu",
               "--ignore-eos", "--dump-logits", str(tmp_path / "logits"), *more]  # fmt: skip
        assert main(run) == 0
        found.append(load_file(tmp_path / "logits")["logits"])
    assert torch.isclose(*found, rtol=1e-3, atol=1e-3).float().mean() > 0.9 and not torch.equal(*found)
