"""`torchrun -m sparse_attn`: the same tokens as one process, one error where something is wrong, an end where one dies."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from sparse_attn.cli.main import main
from sparse_attn.cli.shipped import shipped_models
from sparse_attn.cli.sources import identity_of
from sparse_attn.generation.graph import check_capturable
from sparse_attn.mesh import planned_mesh
from sparse_attn.spec import preset

ROOT = Path(__file__).parents[2]


def torchrun(ranks: int, *arguments: str, program: Sequence[str] = ("-m", "sparse_attn")) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), *program,
         *arguments], cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def test_a_graph_of_several_processes_needs_gpus():
    with pytest.raises(ValueError, match=r"graph: got 2 processes on device cpu, whose collectives \(gloo\) cannot be"):
        check_capturable(torch.device("cpu"), "auto", preset("tiny_v32"), torch.float32, mesh=planned_mesh(tensor=2))


@pytest.mark.parametrize(
    ("grid", "count"),
    (
        ("--tensor-parallel 2", 2), ("--context-parallel 2", 2), ("--expert-parallel 2", 2),
        ("--tensor-parallel 2 --context-parallel 3", 6), ("--context-parallel 2 --expert-parallel 4", 4),
    ),
)  # fmt: skip
def test_one_process_says_how_more_are_started(grid, count, capsys):
    for command in ("generate", "quality"):
        given = [command, "--model", "reader-v32", *grid.split()]
        assert main(given) == 2
        option, size = grid.split()[:2]
        assert (
            f"error: {option}: got {size} in one process, allowed: 1, or {count} processes: "
            f"torchrun --nproc-per-node {count} -m sparse_attn {' '.join(given)}\n"
        ) in capsys.readouterr().err
    assert main(["generate", "--data-parallel", "2", "--prompts", "a file", "--out", "b"]) == 2
    assert (
        "--data-parallel: got 2 in one process, allowed: 1, or 2 processes: torchrun --nproc-per-node 2 -m sparse_attn "
        "generate --data-parallel 2 --prompts 'a file' --out b\n"
    ) in capsys.readouterr().err


STARTED = dict(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="localhost", MASTER_PORT="29500")


@pytest.mark.parametrize(
    ("name", "changed"),
    (
        ("WORLD_SIZE", dict(RANK="1", WORLD_SIZE=None)),
        ("RANK", dict(RANK=None)),
        ("RANK", dict(RANK=None, WORLD_SIZE="1")),
        *(("RANK", dict(RANK=rank)) for rank in ("2", "-1", "x", "", "1.0", "\u0661", "9" * 5000)),
        ("RANK", dict(RANK="1", WORLD_SIZE="1")),
        *(("WORLD_SIZE", dict(WORLD_SIZE=world)) for world in ("0", "-2", "two", "")),
        *(("LOCAL_RANK", dict(LOCAL_RANK=place)) for place in (None, "2", "x", "")),
        *(("MASTER_ADDR", dict(MASTER_ADDR=host)) for host in (None, "")),
        *(("MASTER_PORT", dict(MASTER_PORT=port)) for port in (None, "", "x", "65536")),
        ("LOCAL_WORLD_SIZE", dict(LOCAL_WORLD_SIZE="3")),
        ("WORLD_SIZE", dict(LOCAL_WORLD_SIZE="1")),
    ),
)
def test_a_start_that_is_not_torchruns_is_refused_by_the_name_of_its_variable(name, changed, monkeypatch, capsys):
    for variable, value in (STARTED | changed).items():
        monkeypatch.delenv(variable, raising=False)
        if value is not None:
            monkeypatch.setenv(variable, value)
    assert main(["generate", "--preset", "tiny_v32", "--max-new-tokens", "1"]) == 2
    assert capsys.readouterr().err.startswith(f"python -m sparse_attn: error: {name}: got ")


def test_a_models_identity_is_what_its_folder_holds(tmp_path):
    """The tokenizer to the byte, what the config says, and a sample of each weight."""
    for name in ("one", "other"):
        shutil.copytree(shipped_models()["reader-v4"], tmp_path / name)
        (tmp_path / name / "tokenizer.json").write_text("{}")
    one, other = tmp_path / "one", tmp_path / "other"
    assert identity_of(one) == identity_of(other)
    for name, old, new in (("tokenizer.json", b"{", b"{ "), ("config.json", b"{", b'{"x": 1,')):
        (one / name).write_bytes((one / name).read_bytes().replace(old, new, 1))
        assert identity_of(one)[name] != identity_of(other)[name]
    data = (one / "model.safetensors").read_bytes()
    size = len(data) // 16
    for begin in range(0, len(data) - size, size):
        changed = data[begin : begin + size][::-1] if begin else data[:size]
        (one / "model.safetensors").write_bytes(data[:begin] + changed + data[begin + size :])
        assert (identity_of(one)["weights"] != identity_of(other)["weights"]) is (begin > 0)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ("weights", "config.json", "tokenizer.json", "gone"))
def test_ranks_of_other_files_say_which(name, tmp_path):
    """Where one rank ends before it compares anything, the other one does not wait for it."""
    for folder in ("0", "1"):
        shutil.copytree(shipped_models()["reader-v32"], tmp_path / folder)
        (tmp_path / folder / "tokenizer.json").write_text("{}")
    if name == "gone":
        shutil.rmtree(tmp_path / "1")
    else:
        path = tmp_path / "1" / ("model.safetensors" if name == "weights" else name)
        data = bytearray(path.read_bytes())
        if name == "weights":  # what is sharded, and compared nowhere else
            data[-len(data) // 8 :] = reversed(data[-len(data) // 8 :])
        path.write_bytes(
            data.replace(b"{", b'{"x": 1,', 1) if name == "config.json" else data + b" " * (name != "weights")
        )
    given = "-m sparse_attn generate --device cpu --prompt-ids 1,2 --max-new-tokens 1 --model"
    running = torchrun(2, program=["--no-python", "sh", "-c", f"exec {sys.executable} {given} {tmp_path}/$RANK"])
    _, err = running.communicate(timeout=60)
    assert running.returncode
    if name == "gone":
        assert f"error: --model: got '{tmp_path}/1'" in err
    else:
        assert f"error: {name}: got another value on rank 1 than on rank 0, allowed: the same on all ranks that" in err


@pytest.mark.few(0)
@pytest.mark.parametrize("name", shipped_models())
@pytest.mark.parametrize(
    ("ranks", "grid"), ((2, ()), (2, ("--expert-parallel", "2")), (2, ("--context-parallel", "2")))
)
def test_readers(name, ranks, grid, tmp_path):
    """Files are read by slices; bytes of each rank are at most what all hold and the rest / ranks."""
    common = ["generate", "--model", name, "--device", "cpu", "--max-new-tokens", "12", "--prefill-tokens", "200"]
    assert main([*common, "--json", str(tmp_path / "one.json")]) == 0
    running = torchrun(ranks, *common, *grid, "--json", str(tmp_path / "all.json"))
    out, err = running.communicate(timeout=240)
    assert running.returncode == 0, err
    one, found = (json.loads((tmp_path / file).read_text()) for file in ("one.json", "all.json"))
    assert found["tokens"] == one["tokens"] and found["text"] == one["text"]
    assert one["collective_bytes_per_step"] == 0 < found["collective_bytes_per_step"]
    if "--context-parallel" in grid:
        assert found["rank_weight_bytes"] == one["rank_weight_bytes"]
        assert found["rank_cache_bytes"] < one["rank_cache_bytes"]
    else:
        assert found["rank_weight_bytes"] < one["rank_weight_bytes"]
        assert found["rank_cache_bytes"] == one["rank_cache_bytes"]
    assert "tokens a second" in err and err.count("tokens a second") == 1 and out.count(one["text"]) <= 1


@pytest.mark.few(0)
def test_one_error_of_all():
    running = torchrun(2, "generate", "--preset", "tiny_v32", "--tensor-parallel", "3")
    _, err = running.communicate(timeout=120)
    assert running.returncode and err.count("sparse_attn: error: mesh: got tensor 3 x context 1 x data 1 for 2") == 1
    assert err.count(": error: ") == 1


DYING = {
    "gloo": ("--preset", "tiny_v32", "--max-new-tokens", "8000", "--prompt-ids", "1,2,3"),
    "nccl": ("--model", "reader-v32", "--max-new-tokens", "8000", "--graph", "--prompt", "to be"),
}


@pytest.mark.parametrize(
    ("backend", "processes"),
    (
        pytest.param("gloo", 2, marks=pytest.mark.few(0)),
        pytest.param("nccl", 2, marks=(pytest.mark.gpu, pytest.mark.gpus(2))),
        pytest.param("nccl", 4, marks=(pytest.mark.gpu, pytest.mark.gpus(4))),
    ),
)
def test_a_rank_that_dies_ends_all(backend, processes):
    running = torchrun(processes, "generate", *DYING[backend], "--ignore-eos", "--progress")
    try:
        assert running.stderr is not None
        while "decode" not in (line := running.stderr.read(80)):
            assert line, "ended before it decoded"
        children = Path(f"/proc/{running.pid}/task/{running.pid}/children").read_text().split()
        os.kill(int(children[-1]), signal.SIGKILL)
        begun = time.monotonic()
        _, err = running.communicate(timeout=60)
        assert running.returncode and time.monotonic() - begun < 60
        assert "SIGKILL" in err and ": error: " not in err
    finally:
        running.kill()


@pytest.mark.few(0)
@pytest.mark.parametrize(
    "grid",
    (
        ("--data-parallel", "2"),
        ("--tensor-parallel", "2"),
        ("--tensor-parallel", "2", "--data-parallel", "2"),
        ("--data-parallel", "2", "--expert-parallel", "2"),
    ),
)
def test_prompts_of_a_file(grid, tmp_path):
    """Data ranks take turns at prompts; answers are one process's. A line that was cut short is answered again."""
    asked, one, all_of_them = (tmp_path / name for name in ("asked.jsonl", "one.jsonl", "all.jsonl"))
    lines = [{"id": f"p{n}", "prompt_ids": [n + 1, 7, 9] * (n + 1), "max_new_tokens": 4 + n % 3} for n in range(7)]
    asked.write_text("".join(json.dumps(line) + "\n" for line in lines))
    common = [
        "generate",
        "--preset",
        "tiny_v4",
        "--cache",
        "fp32",
        "--ignore-eos",
        "--prompts",
        str(asked),
        "--rows",
        "3",
    ]
    assert main([*common, "--out", str(one)]) == 0
    first, second, *_ = one.read_text().splitlines()
    all_of_them.write_text(first + "\n" + second[:20])
    ranks = 2 ** sum(option in ("--data-parallel", "--tensor-parallel") for option in grid)
    running = torchrun(ranks, *common, *grid, "--out", str(all_of_them))
    _, err = running.communicate(timeout=240)
    assert running.returncode == 0, err
    answers = [sorted(path.read_text().splitlines()) for path in (one, all_of_them)]
    assert answers[0] == answers[1] and err.count("7 prompts in") == 1


@pytest.mark.few(0)
@pytest.mark.parametrize("name", ("reader-v32", "reader-v4"))
@pytest.mark.parametrize("grid", (("--expert-parallel", "2"), ("--context-parallel", "2")))
def test_drafts(name, grid, tmp_path):
    """Of the model's layer of multi-token prediction, as many accepted as by one process, of a prompt and of a file."""
    common = ["generate", "--model", name, "--device", "cpu", "--max-new-tokens", "16", "--cache", "fp32"]
    asked = tmp_path / "asked.jsonl"
    asked.write_text("".join(json.dumps({"id": n, "prompt": "to be " * n}) + "\n" for n in range(1, 5)))
    many = [*common, "--prompts", str(asked), "--rows", "3", "--blocks", "24"]
    assert main([*common, "--json", str(tmp_path / "plain.json")]) == 0
    assert main([*common, "--speculate", "2", "--json", str(tmp_path / "one.json")]) == 0
    assert main([*many, "--out", str(tmp_path / "one.jsonl")]) == 0
    for arguments in ([*common, "--json", str(tmp_path / "all.json")], [*many, "--out", str(tmp_path / "all.jsonl")]):
        running = torchrun(2, *arguments, *grid, "--speculate", "2")
        _, err = running.communicate(timeout=240)
        assert running.returncode == 0, err
    plain, one, found = (json.loads((tmp_path / f"{file}.json").read_text()) for file in ("plain", "one", "all"))
    assert found["tokens"] == one["tokens"] == plain["tokens"] and found["drafter"] == "mtp"
    assert found["accepted_per_step"] == one["accepted_per_step"] > 1.5
    answers = [sorted((tmp_path / f"{file}.jsonl").read_text().splitlines()) for file in ("one", "all")]
    assert answers[0] == answers[1] and len(answers[0]) == 4


@pytest.mark.few(0)
def test_quality(tmp_path):
    common = [
        "quality",
        "--model",
        "reader_v4",
        "--ways",
        "sparse,decoded",
        "--documents",
        "2",
        "--context",
        "400",
        "--device",
        "cpu",
    ]
    assert main([*common, "--json", str(tmp_path / "one.json")]) == 0
    running = torchrun(2, *common, "--context-parallel", "2", "--json", str(tmp_path / "all.json"))
    out, err = running.communicate(timeout=240)
    assert running.returncode == 0, err
    one, found = (json.loads((tmp_path / file).read_text())["ways"] for file in ("one.json", "all.json"))
    for way in ("sparse", "decoded"):
        assert found[way]["right"] == one[way]["right"]
        assert abs(found[way]["bits_per_byte"] - one[way]["bits_per_byte"]) < 1e-3
    assert out.count("decoded") == 1


@pytest.mark.few(0)
@pytest.mark.parametrize("processes", (2, 4))  # V4's reader has 2 groups of heads
def test_suites_over_processes_run_dry(processes):
    running = torchrun(processes, "--dry", program=["scripts/distributed.py"])
    out, err = running.communicate(timeout=240)
    assert running.returncode == 0, err
    suites = ("collectives", "soak", "step", "exact", "experts", "prefill")
    assert all(f"distributed_{suite}: " in err and f"distributed_{suite} " in out for suite in suites)


def over_gpus(count, *grid):
    return pytest.param(count, grid, marks=pytest.mark.gpus(count))


@pytest.mark.gpu
@pytest.mark.parametrize("name", shipped_models())
@pytest.mark.parametrize(
    ("processes", "grid"),
    (
        over_gpus(2),
        over_gpus(2, "--expert-parallel", "2"),
        over_gpus(2, "--context-parallel", "2"),
        over_gpus(4, "--tensor-parallel", "2", "--context-parallel", "2", "--expert-parallel", "4"),
        over_gpus(4, "--context-parallel", "4"),
    ),
)
def test_graphs_over_gpus(name, processes, grid, tmp_path):
    """Collectives of NCCL in a captured decode step."""
    common = ["generate", "--model", name, "--dtype", "fp32", "--cache", "fp32", "--max-new-tokens", "12", "--graph"]
    assert main([*common, "--json", str(tmp_path / "one.json")]) == 0
    running = torchrun(processes, *common, *grid, "--json", str(tmp_path / "all.json"))
    _, err = running.communicate(timeout=240)
    assert running.returncode == 0, err
    one, found = (json.loads((tmp_path / file).read_text()) for file in ("one.json", "all.json"))
    assert found["tokens"] == one["tokens"] and found["graph_captures"] == 1
