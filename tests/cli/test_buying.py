"""What plan says a user must buy: bytes of weights in every form, of a rank's share, and the cards that these fit."""

from __future__ import annotations

import json
import re
from pathlib import Path

import expecttest
import pytest
import torch

from sparse_attn.checkpoints.formats import FORMS, form_of, form_said_by, predicted_of
from sparse_attn.checkpoints.load import load, read_config
from sparse_attn.checkpoints.memory import file_bytes, weight_bytes
from sparse_attn.checkpoints.published import published_bytes, write_published
from sparse_attn.checkpoints.share import share_of
from sparse_attn.cli.main import main
from sparse_attn.models.shapes import param_shapes
from sparse_attn.spec import CompressedSpec, preset
from sparse_attn.weight_layout import weight_bytes as bytes_of

PAGE = Path(__file__).resolve().parents[2] / "scripts" / "docs" / "pages" / "many-gpus.md"
LARGE = ("deepseek_v32", "glm5", "deepseek_v4_flash", "deepseek_v4_pro")


class TestGolden(expecttest.TestCase):
    def test_bytes_of_published_files(self):
        """Sources: DeepSeek's and Zhipu's repositories, whose files are 689 GB (V3.2), 148.66 GiB (V4-Flash) and about
        865 GB (V4-Pro)."""
        lines = []
        for name in LARGE:
            found = file_bytes(preset(name), "published")
            kinds = ", ".join(f"{kind} {nbytes / 1e9:.2f}" for kind, nbytes in found.items())
            total = sum(found.values())
            lines.append(f"{name}: {total / 1e9:.1f} GB, {total / 2**30:.2f} GiB\n  {kinds}")
        self.assertExpectedInline(
            "\n".join(lines),
            """\
deepseek_v32: 689.5 GB, 642.12 GiB
  embedding 3.71, expert 654.07, mlp 3.74, indexer 0.88, attention 11.42, mtp 15.44, other 0.21
glm5: 760.0 GB, 707.78 GiB
  embedding 3.81, expert 724.95, mlp 3.51, indexer 0.75, attention 12.87, mtp 13.84, other 0.24
deepseek_v4_flash: 159.6 GB, 148.65 GiB
  embedding 2.12, expert 147.17, mlp 1.08, indexer 0.28, attention 5.12, mtp 3.59, other 0.25
deepseek_v4_pro: 864.7 GB, 805.32 GiB
  embedding 3.71, expert 822.05, mlp 4.03, indexer 0.63, attention 19.63, mtp 13.96, other 0.70""",
        )

    def test_gigabytes_of_one_gpu_and_of_each_of_eight(self):
        lines = []
        for name in LARGE:
            sizes = (
                sum(weight_bytes(share_of(preset(name), ranks), torch.bfloat16, "published", predicted=1).values())
                for ranks in (1, 8)
            )
            lines.append(f"{name}: " + " ".join(f"{size / 1e9:.1f}" for size in sizes))
        self.assertExpectedInline(
            "\n".join(lines),
            """\
deepseek_v32: 690.6 90.4
glm5: 761.2 99.6
deepseek_v4_flash: 160.1 22.5
deepseek_v4_pro: 865.2 115.1""",
        )


@pytest.mark.sampled(5)
@pytest.mark.parametrize("name", ("tiny_v32", "tiny_glm5", "tiny_v4"))
@pytest.mark.parametrize("form", FORMS)
def test_bytes_by_kind_are_those_of_the_files_and_of_what_is_loaded(name, form, tmp_path):
    spec = preset(name)
    if form == "flash-base" and not isinstance(spec, CompressedSpec):
        with pytest.raises(ValueError, match="format: got 'flash-base', allowed for tiny"):
            file_bytes(spec, form)
        return
    assert sum(file_bytes(spec, form).values()) == published_bytes(spec, form)
    write_published(tmp_path, spec, form)
    predicted = predicted_of(form_of(spec, form))
    held = sum(map(bytes_of, load(tmp_path, expand=False, mtp=bool(predicted))[1].values()))
    assert sum(weight_bytes(spec, torch.bfloat16, form, predicted=predicted).values()) == held
    assert (form_said_by(read_config(tmp_path)[0], spec) == "bf16") == (form == "bf16")


@pytest.mark.parametrize(
    ("name", "ranks"), (("deepseek_v32", 8), ("glm5", 4), ("deepseek_v4_flash", 2), ("deepseek_v4_pro", 8))
)
def test_shares_of_all_ranks_make_the_whole(name, ranks):
    """Every weight of a share is the whole weight, or a part of it along one dimension."""
    spec = preset(name)
    whole, part = param_shapes(spec), param_shapes(share_of(spec, ranks))
    assert list(whole) == list(part)
    for weight, shape in whole.items():
        if weight.endswith("moe.table"):  # as wide as a token has experts
            continue
        cut = [(full, own) for full, own in zip(shape, part[weight]) if full != own]
        assert all(full == own * ranks for full, own in cut) and len(cut) <= 1, weight
    cut = {name for name in whole if whole[name] != part[name]}
    assert {name for name in whole if name.endswith(("attn.q_b", "moe.gate_up", "moe.down", "embed", "lm_head"))} <= cut
    assert not any("norm" in name or "index" in name or "shared" in name for name in cut)


def test_a_share_says_what_cannot_be_sharded():
    for ranks, said in ((3, "allowed: a divisor of the 128 heads"), (128, "for 256 experts"), (0, "at least 1")):
        with pytest.raises(ValueError, match=said):
            share_of(preset("deepseek_v32"), ranks)
    flash = preset("deepseek_v4_flash")
    assert share_of(flash, 2).moe.experts_per_token == 3
    assert share_of(flash, 1) is flash
    assert share_of(preset("tiny_v4"), 2).vocab_size == 129  # of 257


def test_plan_says_which_cards_fit(tmp_path, capsys):
    out = tmp_path / "plan.json"
    assert main(["plan", "--preset", "deepseek-v4-flash", "--max-model-len", "131072", "--json", str(out)]) == 0
    numbers = json.loads(out.read_text())
    fits = {rank["gpus"]: [card for card, fits in rank["fits"].items() if fits] for rank in numbers["gpus"]}
    assert fits == {1: ["mi300x"], 2: ["h200", "mi300x"], 4: ["h200", "h100", "mi300x"], 8: ["h200", "h100", "mi300x"]}
    first, *others = numbers["gpus"]
    assert first["bytes"] == numbers["bytes"] and first["weights"] == numbers["weights"]
    assert all(rank["cache_bytes"] == numbers["cache_bytes"] for rank in others)
    shown = capsys.readouterr().out
    assert "(148.65 GiB)" in shown and "sharded over tensor ranks: heads, vocabulary" in shown
    assert main(["plan", "--preset", "tiny_v4"]) == 0
    assert "got 4 ranks for 2 groups of heads of tiny_v4" in capsys.readouterr().out


@pytest.mark.parametrize("name", LARGE)
def test_plan_of_eight_gpus_is_what_the_page_says(name, tmp_path):
    """Weights, caches and all in GB, and MB sent, of 8 tensor ranks, then of 8 context ranks."""
    letters = ".?".join(re.sub(r"\W|_", "", name))
    (row,) = re.findall(rf"^\| {letters} (\| \d.*)$", PAGE.read_text(), re.IGNORECASE | re.MULTILINE)
    cells = [[int(number) for number in re.findall(r"\d+", cell)] for cell in row.split("|")[1:5]]
    for kind, (sizes, sent) in (("tensor", cells[:2]), ("context", cells[2:])):
        out = tmp_path / f"{kind}.json"
        given = ["--max-batch", "8", "--max-model-len", "131072", "--max-batched-tokens", "4096", "--gpus", "8"]
        assert main(["plan", "--preset", name, *given, f"--{kind}-parallel", "8", "--expert-parallel", "8",
                     "--json", str(out)]) == 0  # fmt: skip
        (rank,) = json.loads(out.read_text())["gpus"]
        assert [round(rank[key] / 1e9) for key in ("weight_bytes", "cache_bytes", "bytes")] == sizes
        assert [round(sum(rank["collective_bytes_per_step"].values()) / 1e6)] == sent


def test_plan_of_a_grid(tmp_path, capsys):
    out = tmp_path / "plan.json"
    common = [
        "plan",
        "--preset",
        "deepseek_v4_flash",
        "--max-model-len",
        "65536",
        "--max-batch",
        "8",
        "--json",
        str(out),
    ]
    grid = ["--gpus", "8", "--tensor-parallel", "4", "--context-parallel", "2", "--expert-parallel", "8"]
    assert main([*common, *grid]) == 0
    numbers = json.loads(out.read_text())
    (rank,) = numbers["gpus"]
    assert rank["ranks"] == {"tensor": 4, "context": 2, "data": 1, "expert": 8}
    assert rank["weights"]["expert"] * 8 == numbers["weights"]["expert"]
    assert rank["weights"]["embedding"] * 4 == numbers["weights"]["embedding"]
    caches = numbers["caches"]
    paged = sum(cache["bytes"] for kind, cache in caches.items() if kind == "index" or kind.endswith("entries"))
    assert numbers["cache_bytes"] - rank["cache_bytes"] == paged // 2
    sent = rank["collective_bytes_per_step"]
    # embedding and 43 sums of heads over 4 ranks, logits gathered; 43 sums of experts over 8; rows of 4096 bf16 values
    row, logits = 8 * 4096 * 2, 8 * 129280 // 4 * 2
    assert sent["tensor"] == 44 * (2 * 3 * row // 4) + 3 * logits
    assert sent["experts"] == 43 * (2 * 7 * row // 8) and sent["context"] > 0
    assert "tensor 4, context 2, expert 8" in capsys.readouterr().out
    assert main([*common, "--tensor-parallel", "2"]) == 2
    assert "--tensor-parallel: got it without --gpus" in capsys.readouterr().err


def test_plan_of_gpus_that_no_model_runs_on_is_an_error(tmp_path, capsys):
    out = tmp_path / "plan.json"
    for asked, said in (
        (("--gpus", "3"), "mesh: got 3 ranks for 128 heads of deepseek_v32, allowed: a divisor"),
        (("--gpus", "16"), "gpus: got 16, allowed: at most 8, no model runs over several hosts"),
        (("--gpus", "16", "--data-parallel", "4"), "gpus: got 16, allowed: at most 8"),
    ):
        assert main(["plan", "--preset", "deepseek_v32", *asked, "--json", str(out)]) == 2
        shown = capsys.readouterr()
        assert f"error: {said}" in shown.err and not shown.out and not out.exists()
