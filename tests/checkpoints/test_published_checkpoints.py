"""write-checkpoint: folders in the forms that are published, and that they load."""

from __future__ import annotations

import json
import math

import pytest
import torch
from safetensors import safe_open
from support.checkpoints import CASES, SPECS

from sparse_attn.checkpoints.formats import first_layers
from sparse_attn.checkpoints.load import load
from sparse_attn.checkpoints.names import spelling_of
from sparse_attn.checkpoints.published import published_bytes, write_published
from sparse_attn.cli.main import main
from sparse_attn.models.shapes import param_shapes
from sparse_attn.spec import preset

# dtype of an expert, of its scale; of a linear's scale; name of an expert, of its scale.
V32, V4, TF = (
    "model.layers.1.mlp.experts.0.gate_proj.weight",
    "layers.1.ffn.experts.0.w1",
    "model.layers.1.mlp.experts.gate_up_proj",
)
EXPECTED = {
    ("v32", "published"): ("F8_E4M3", "F32", V32, V32 + "_scale_inv"),
    ("v32", "fp8-e8m0"): ("F8_E4M3", "F8_E8M0", V32, V32 + "_scale_inv"),
    ("v32", "fused"): ("F8_E4M3", "F32", TF, TF + "_scale_inv"),
    ("v32", "bf16"): ("BF16", None, V32, V32 + "_scale_inv"),
    ("v4", "published"): ("I8", "F8_E8M0", V4 + ".weight", V4 + ".scale"),
    ("v4", "flash-base"): ("F8_E4M3", "F32", V4 + ".weight", V4 + ".scale"),
    ("v4", "fp8-e8m0"): ("F8_E4M3", "F8_E8M0", V4 + ".weight", V4 + ".weight_scale_inv"),
    ("v4", "fused"): ("I8", "F8_E8M0", TF, TF + "_scale_inv"),
    ("v4", "bf16"): ("BF16", None, V4 + ".weight", V4 + ".scale"),
}

QUANTISED = """
    attn.q_a attn.q_b attn.kv_a attn.kv attn.o attn.o_a attn.o_b index.q_b index.k moe.gate_up moe.down
    moe.shared_gate_up moe.shared_down""".split()


class Fused:
    """A checkpoint of fused experts."""

    def __contains__(self, name):
        return True


def headers(folder):
    """(dtype, shape) of every tensor by its name, and that the index tells the truth."""
    found, index = {}, json.loads((folder / "model.safetensors.index.json").read_text())
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                assert index["weight_map"][name] == path.name and name not in found
                found[name] = file.get_slice(name).get_dtype(), tuple(file.get_slice(name).get_shape())
    assert found.keys() == index["weight_map"].keys()
    return found, index["metadata"]["total_size"]


@pytest.mark.parametrize("name,form", CASES)
def test_a_written_checkpoint_loads(name, form, tmp_path):
    spec = SPECS[name]
    total = write_published(tmp_path / "out", spec, form, seed=3)
    loaded_spec, params = load(tmp_path / "out", dtype=torch.float32, expand=True)
    assert loaded_spec.num_layers == spec.num_layers and loaded_spec.moe == spec.moe
    for param, shape in param_shapes(spec).items():
        assert tuple(params[param].shape) == shape
    for kind in ("moe.gate_up", "moe.down", "attn.q_b"):
        value = params[f"layers.1.{kind}"]
        gain = value.double().square().mean().sqrt().item() * math.sqrt(value.shape[-1])
        assert 0.5 < gain < 2, kind
    found, said = headers(tmp_path / "out")
    if (name, form) in EXPECTED:
        dtype, scale_dtype, expert, scale = EXPECTED[name, form]
        assert found[expert][0] == dtype and (found[scale][0] if scale_dtype else found.get(scale)) == scale_dtype
    sizes = {"I8": 1, "F8_E8M0": 1, "F8_E4M3": 1, "BF16": 2, "F32": 4, "I64": 8}
    assert total == said == sum(sizes[dtype] * math.prod(shape) for dtype, shape in found.values())


def test_the_same_seed_is_the_same_checkpoint(tmp_path):
    for folder, seed in (("a", 1), ("b", 1), ("c", 2)):
        write_published(tmp_path / folder, SPECS["v4"], "published", seed)
    shards = sorted(path.name for path in (tmp_path / "a").glob("*.safetensors"))
    assert shards
    for shard in shards:
        a, b, c = ((tmp_path / folder / shard).read_bytes() for folder in "abc")
        assert a == b and a != c, shard


@pytest.mark.parametrize(
    "name,form,gigabytes",
    [
        ("deepseek_v4_flash", "published", 160.0),
        ("deepseek_v4_pro", "published", 865),
        ("deepseek_v32", "published", 690),
    ],
)
def test_full_sizes_are_those_of_the_published_files(name, form, gigabytes):
    """What the files on the hub take, multi-token prediction included."""
    assert published_bytes(preset(name), form) / 1e9 == pytest.approx(gigabytes, rel=0.01)


@pytest.mark.parametrize("name", ["deepseek_v4_flash", "deepseek_v4_pro", "tiny_v4"])
def test_deepseeks_names_are_what_the_loader_renames(name):
    spec = first_layers(preset(name), 4)
    spelling, seen = spelling_of(spec), set()
    for param in param_shapes(spec):
        for source in spelling.sources(param, ()):
            theirs = spelling.published(source)
            assert (
                spelling.rename(theirs) == source
                and "model." not in theirs
                and "_proj" not in theirs.replace("weights_proj", "")
            )
            seen.add(theirs)
    assert {"layers.2.attn.indexer.compressor.ape", "layers.0.hc_attn_fn", "hc_head_base"} & seen or name == "tiny_v4"


def test_the_command_writes_what_generate_reads(tmp_path, capsys):
    out = str(tmp_path / "out")
    assert main(["write-checkpoint", "--preset", "tiny-v4", "--layers", "2", "--out", out]) == 0
    assert "2 layers of tiny_v4, published" in capsys.readouterr().out
    run = ["generate", "--model", out, "--prompt-ids", "1,2,3", "--max-new-tokens", "2", "--device", "cpu"]
    assert main(run) == 0
    for arguments, message in (
        (["--preset", "tiny_v4", "--out", out], "which holds files, allowed: an empty or a new one"),
        (
            ["--preset", "tiny_v32", "--out", out + "2", "--format", "flash-base"],
            "format: got 'flash-base', allowed for",
        ),
        (["--preset", "tiny_v4", "--out", out + "2", "--layers", "99"], "layers: got 99, allowed: 1 to the"),
    ):
        assert main(["write-checkpoint", *arguments]) == 2
        assert message in capsys.readouterr().err
        assert not (tmp_path / "out2").exists()


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "name,form", [(name, form) for name, form in CASES if form in ("published", "flash-base", "fp8-e8m0")]
)
def test_transformers_reads_the_same_weights(name, form, tmp_path, monkeypatch):
    """To the bit, by its own dequantisation. It reads no fused experts that are quantised."""
    from transformers import AutoModelForCausalLM, FineGrainedFP8Config
    from transformers.quantizers import quantizer_finegrained_fp8

    # It asks for accelerate, which places weights on devices and has no part in reading them.
    monkeypatch.setattr(quantizer_finegrained_fp8, "is_accelerate_available", lambda *_: True)
    write_published(tmp_path / "out", SPECS[name], form, seed=5)
    ours = load(tmp_path / "out", dtype=torch.bfloat16, expand=True)[1]
    wide = FineGrainedFP8Config(dequantize=True)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", quantization_config=wide, dtype=torch.bfloat16)
    theirs, spelling, compared = theirs.state_dict(), spelling_of(SPECS[name]), 0
    for param in param_shapes(SPECS[name]):
        if not param.endswith(tuple(QUANTISED)):
            continue
        found = torch.cat([theirs[source].flatten() for source in spelling.sources(param, Fused())])
        assert found.dtype == torch.bfloat16 and torch.equal(found, ours[param].flatten()), param
        compared += 1
    assert compared >= 6 * SPECS[name].num_layers
