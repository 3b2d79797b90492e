"""The gate in parts and the comparison of runs, with runs that are made up: no GPU."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parents[2]
TESTS = {path.name for path in (ROOT / "tests").rglob("test_*.py")}


def of_tests(passed=5, failed=0, skipped=0, code=0):
    return {"tests": {"passed": passed, "failed": failed, "skipped": skipped}, "code": code, "seconds": 1.0}


def of_suites(us=10.0, suite="layer_v32", code=0):
    return {"code": code, "seconds": 1.0, "records": [{"suite": suite, "case": "one", "us": us}]}


ABOUT = {"commit": "a", "dirty": None, "versions": {"torch": "2.11.0"}, "gpu": "NVIDIA H200"}


@pytest.fixture
def gate(monkeypatch, tmp_path):
    """gpu_gate on a pretended GPU: ``ran`` are the parts that ran, ``outcome`` what each comes to."""
    import gpu_gate

    fake = SimpleNamespace(main=gpu_gate.main, about=dict(ABOUT), ran=[], outcome={}, path=tmp_path / "result.json")

    def run_part(one):
        fake.ran.append(str(one))
        return fake.outcome.get(str(one)) or (of_tests() if one.kind == "tests" else of_suites())

    monkeypatch.setattr(gpu_gate, "about_this", lambda parser, commit: dict(fake.about))
    monkeypatch.setattr(gpu_gate, "path_of", lambda gpu: fake.path)
    monkeypatch.setattr(gpu_gate, "run_part", run_part)
    monkeypatch.setattr(gpu_gate, "DURATIONS", tmp_path / "durations.json")
    fake.result = lambda: json.loads(fake.path.read_text())
    return fake


@pytest.mark.parametrize("known", [None, {}, {"test_topk.py": 30, "load": 20}])
@pytest.mark.parametrize("of", [1, 2, 7])
def test_parts_are_disjoint_and_hold_everything(monkeypatch, of, known):
    import gpu_gate
    from gpu_gate import Part

    if known is not None:
        monkeypatch.setattr(gpu_gate, "durations", lambda: known)
    for kind in gpu_gate.KINDS:
        names = set(gpu_gate.names_of(kind))
        shares = [Part(kind, number, of).take(names) for number in range(1, of + 1)]
        assert sorted(sum(shares, [])) == sorted(names) and all(shares)
        assert shares == [Part(kind, number, of).take(sorted(names, reverse=True)) for number in range(1, of + 1)]
        taken = {name: gpu_gate.durations().get(name, 1) for name in names}
        work = [sum(taken[name] for name in share) for share in shares]
        assert max(work) - min(work) <= max(taken.values())


@pytest.mark.parametrize("text", ["tests", "tests:0/2", "tests:3/2", "suites:1/0", "other:1/1", "tests:1/2 "])
def test_a_part_that_cannot_be_is_refused(text, capsys, gate):
    with pytest.raises(SystemExit):
        gate.main(["--part", text])
    assert "allowed: tests:I/N or suites:I/N, I from 1 to N" in capsys.readouterr().err and not gate.ran


def test_parts_come_to_one_result(gate, capsys):
    for part, missing in (
        ("suites:2/2", ["tests:1/1", "suites:1/2"]), ("tests:2/2", ["tests:1/2", "suites:1/2"]),
        ("tests:1/2", ["suites:1/2"]), ("suites:1/2", []),
    ):  # fmt: skip
        assert gate.main(["--part", part]) == 0
        assert gate.result()["unfinished"] == missing and gate.result()["good"] == (not missing)
        assert (f"unfinished: {', '.join(missing)}" if missing else ": good") in capsys.readouterr().out
    assert gate.result()["tests"] == {"passed": 10, "failed": 0, "skipped": 0} and gate.result()["commit"] == "a"
    assert list(gate.result()["parts"]) == ["tests:1/2", "tests:2/2", "suites:1/2", "suites:2/2"]


def test_without_parts_all_of_it_runs_and_replaces_what_was_there(gate):
    gate.path.write_text(json.dumps({"commit": "old", "records": []}))
    assert gate.main([]) == 0 and gate.ran == ["tests:1/1", "suites:1/1"] and gate.result()["good"]


@pytest.mark.parametrize("key, other", [
    ("commit", "b"), ("dirty", True), ("versions", {"torch": "2.12.0"}), ("gpu", "NVIDIA H200 NVL"),
])  # fmt: skip
def test_parts_of_two_are_refused_before_anything_runs(gate, capsys, key, other):
    assert gate.main(["--part", "tests:1/2"]) == 0
    before = gate.path.read_text()
    gate.about[key] = other
    with pytest.raises(SystemExit):
        gate.main(["--part", "tests:2/2"])
    said = capsys.readouterr().err
    assert f"{key}: got {ABOUT[key]!r} and {other!r}, allowed: parts of one; --fresh begins a new result" in said
    assert gate.ran == ["tests:1/2"] and gate.path.read_text() == before
    assert gate.main(["--part", "tests:2/2", "--fresh"]) == 0
    assert list(gate.result()["parts"]) == ["tests:2/2"] and gate.result()[key] == other


def test_a_part_runs_once(gate, capsys):
    """Another try could hide that the first one failed."""
    gate.outcome["tests:1/2"] = of_tests(failed=1, code=1)
    assert gate.main(["--part", "tests:1/2"]) == 1
    for part, said in (
        ("tests:1/2", "tests:1/2: in the result already"),
        ("tests:1/3", "tests: got parts of 2 and of 3"),
    ):
        with pytest.raises(SystemExit):
            gate.main(["--part", part])
        assert said in capsys.readouterr().err and gate.ran == ["tests:1/2"]


@pytest.mark.parametrize("part, outcome", [
    ("tests:1/1", of_tests(passed=0)), ("tests:1/1", of_tests(failed=1)), ("tests:1/1", of_tests(skipped=1)),
    ("tests:1/1", of_tests(code=2)), ("suites:1/1", of_suites(code=1)), ("suites:1/1", {"code": 0, "records": []}),
])  # fmt: skip
def test_one_bad_part_makes_it_bad(gate, part, outcome, capsys):
    gate.outcome[part] = outcome
    assert gate.main([]) == 1 and not gate.result()["good"] and gate.result()["unfinished"] == []
    assert f"NOT GOOD: {part}" in capsys.readouterr().out


def test_changed_files_make_it_bad(gate):
    gate.about["dirty"] = True
    assert gate.main([]) == 0 and not gate.result()["good"]


def test_merging_files_of_other_machines(gate, tmp_path, capsys):
    one, two = tmp_path / "one.json", tmp_path / "two.json"
    assert gate.main(["--part", "tests:1/1", "--fresh", "--out", str(one)]) == 0
    assert gate.main(["--part", "suites:1/1", "--fresh", "--out", str(two)]) == 0
    gate.path.unlink()
    assert gate.main(["--merge", str(one)]) == 1 and gate.result()["unfinished"] == ["suites:1/1"]
    assert gate.main(["--merge", str(one), str(two), str(one)]) == 0 and gate.result()["good"]
    changed = json.loads(two.read_text())
    changed["parts"]["suites:1/1"]["records"][0]["us"] = 1.0
    one.write_text(json.dumps(changed))
    with pytest.raises(SystemExit):
        gate.main(["--merge", str(one), str(two)])
    assert "suites:1/1: got two different results, allowed: one" in capsys.readouterr().err


def test_a_selection_is_no_part_of_a_result(gate, monkeypatch, tmp_path):
    import gpu_gate

    monkeypatch.setattr(gpu_gate, "run_tests", lambda arguments: of_tests(passed=len(arguments)))
    assert gate.main(["--out", str(tmp_path / "some.json"), "--", "tests/ops/test_topk.py", "-x"]) == 0
    assert json.loads((tmp_path / "some.json").read_text())["selected"]["tests"]["tests"]["passed"] == 2
    assert not gate.path.exists()
    with pytest.raises(SystemExit):
        gate.main(["--part", "tests:1/2", "--suite", "layer_v32"])


def test_the_gates_tests_run_every_case(monkeypatch, tmp_path):
    """A pytest of its own, whose report is read."""
    import gpu_gate

    (tmp_path / "test_it.py").write_text(
        "import os, time\n\ndef test_long(record_property):\n    time.sleep(1.1)\n"
        "    record_property('long', os.environ['SPARSE_ATTN_LONG'])\n\ndef test_not():\n    assert False\n"
    )
    monkeypatch.setattr(gpu_gate, "ROOT", tmp_path)
    found = gpu_gate.run_tests(["test_it.py", "-p", "no:cacheprovider"])
    assert found["tests"] == {"passed": 1, "failed": 1, "skipped": 0} and found["code"] == 1
    assert found["reports"] == {"test_long": {"long": "1"}} and found["seconds_of"].keys() == {"test_it.py"}


def test_tests_that_need_more_gpus_are_listed_and_not_counted(gate, monkeypatch, tmp_path, capsys):
    import gpu_gate
    from conftest import skip_where_gpus_are_few

    marks = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    for count in (1, 9):
        marker = pytest.mark.gpus(count).mark
        skip_where_gpus_are_few([SimpleNamespace(get_closest_marker=lambda name: marker, add_marker=marks.append)])
    (mark,) = marks
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests/test_it.py").write_text(
        "import pytest\n\ndef test_none():\n    pass\n\n@pytest.mark.parametrize('a', ['b.c'])\n"
        f"@pytest.mark.skip({mark.kwargs['reason']!r})\ndef test_more(a):\n    assert False\n"
    )
    monkeypatch.setattr(gpu_gate, "ROOT", tmp_path)
    found = gpu_gate.run_tests(["tests/test_it.py", "-p", "no:cacheprovider"])
    assert found["tests"] == {"passed": 1, "failed": 0, "skipped": 0} and found["code"] == 0
    assert found["deselected"] == {"tests/test_it.py::test_more[b.c]": "needs 9 GPUs"}
    gate.outcome["tests:1/2"] = found
    for part in ("tests:1/2", "tests:2/2", "suites:1/1"):
        assert gate.main(["--part", part]) == 0
    assert gate.result()["good"] and gate.result()["deselected"] == found["deselected"]
    assert "deselected: needs 9 GPUs: tests/test_it.py::test_more[b.c]\n" in capsys.readouterr().out


def test_suites_say_their_seconds(monkeypatch, tmp_path, capfd):
    import gpu_gate

    (tmp_path / "bench.py").write_text(
        "import sys\nprint('a: 2.5 s\\nWarning: b: 1 s\\nb: 0.1 s', file=sys.stderr)\n"
        "open(sys.argv[-1], 'w').write('[{}]')\nsys.exit(3)\n"
    )
    monkeypatch.setattr(gpu_gate, "HERE", tmp_path)
    found = gpu_gate.run_suites(["a", "b"])
    assert (found["code"], found["records"], found["seconds_of"]) == (3, [{}], {"a": 2.5, "b": 0.1})
    assert "a: 2.5 s\n" in capfd.readouterr().err


def test_the_seconds_of_a_whole_result_part_the_next_one(gate):
    import gpu_gate

    gate.outcome["tests:1/1"] = of_tests() | {"seconds_of": {"test_a.py": 3.0}}
    gate.outcome["suites:1/1"] = of_suites() | {"seconds_of": {"a": 2.0}}
    assert gate.main(["--part", "suites:1/1"]) == 0 and gpu_gate.durations() == {}
    assert gate.main(["--part", "tests:1/1"]) == 0 and gpu_gate.durations() == {"test_a.py": 3.0, "a": 2.0}


def run_of(**suites):
    """Records with these microseconds a suite."""
    return [{"suite": suite, "case": str(n), "us": us} for suite, times in suites.items() for n, us in enumerate(times)]


@pytest.mark.parametrize("old, new, code, said", [
    (dict(a=[10.0, 20.0]), dict(a=[10.3, 19.7]), 0, "a                      2 cases  1.007  worst  1.030 0"),
    (dict(a=[10.0, 20.0], b=[5.0]), dict(a=[10.3, 20.0], b=[5.0]), 1, "more than 1% slower, or missing: a\n"),
    (dict(plan_cache=[10.0], a=[1.0]), dict(plan_cache=[14.0], a=[1.0]), 0, "host time, exempt"),
    (dict(a=[1.0], b=[1.0]), dict(a=[1.0]), 1, "more than 1% slower, or missing: b\n"),
    (dict(a=[1.0]), dict(a=[1.0, 9.0], b=[1.0]), 0, "1 (new only)"),
    (dict(plan_cache=[1.0]), dict(decode_loop=[1.0]), 1, "no case is in both runs"),
])  # fmt: skip
def test_suites_that_got_slower_are_told(tmp_path, capsys, old, new, code, said):
    import compare_runs

    paths = [tmp_path / "old.json", tmp_path / "new.json"]
    paths[0].write_text(json.dumps(run_of(**old)))
    paths[1].write_text(json.dumps({**ABOUT, "parts": {"suites:1/1": {"records": run_of(**new)}}}))
    assert compare_runs.main([str(path) for path in paths]) == code
    assert said in capsys.readouterr().out


def test_what_a_case_measured_in_parentheses_does_not_name_it():
    from compare_runs import report

    old, new = ([{"suite": "a", "case": f"x ({gb} GB), y", "us": us}] for gb, us in ((1, 10.0), (2, 11.0)))
    assert report(old, new) == 1 and report(old, old) == 0


def test_the_recorded_run_can_be_compared(capsys):
    import compare_runs
    from benchmarks.registry import HOST_TIMED, all_suites

    recorded = next((ROOT / "scripts" / "results").glob("nvidia-*.json"))
    assert compare_runs.main([str(recorded)] * 2) == 0
    assert {line.split()[0] for line in capsys.readouterr().out.splitlines()} <= set(all_suites()) > HOST_TIMED


def test_checkouts_take_turns_and_the_best_counts():
    from compare_runs import take_turns

    order, times = [], iter([3.0, 2.0, 1.0, 5.0])

    def measure(which, name):
        order.append(which)
        return run_of(**{name: [next(times)]}), which == "new"

    old, new, failed = take_turns(["a"], lambda name: measure("old", name), lambda name: measure("new", name), 2)
    assert order == ["old", "new", "new", "old"] and failed == ["a (new)"] * 2
    assert (old, new) == (run_of(a=[3.0]), run_of(a=[1.0]))


def test_two_checkouts_in_one_call(tmp_path):
    import compare_runs

    out = tmp_path / "both.json"
    dry = ["--dry", "--suite", "topk_decode", "--rounds", "1", "--out", str(out)]
    assert compare_runs.main(["--run", str(ROOT), *dry]) == 0
    found = json.loads(out.read_text())
    assert {record["suite"] for record in found["old"] + found["new"]} == {"topk_decode"}
    with pytest.raises(SystemExit, match="^2$"):
        compare_runs.main(["--run", str(tmp_path), "--dry"])
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts/bench.py").touch()
    with pytest.raises(SystemExit, match="no answer, exit code 1"):
        compare_runs.main(["--run", str(tmp_path), "--dry"])


@pytest.fixture
def two_gpus(monkeypatch, tmp_path):
    """gpu_gate --all-gpus on two pretended GPUs, in four parts: ``ran`` are (GPU, part), ``outcome`` what each comes to."""
    import gpu_gate

    call = ["--all-gpus", str(tmp_path), "--commit", "a"]
    fake = SimpleNamespace(main=lambda *more: gpu_gate.main([*call, *more]), ran=[], outcome={}, missing=[])

    def run(command, cwd, env, **_):
        name = command[command.index("--part") + 1]
        fake.ran.append((env["CUDA_VISIBLE_DEVICES"], name))
        found = fake.outcome.get(name) or (of_tests() if name.startswith("tests") else of_suites())
        if found != "killed":
            result = gpu_gate.result_of(dict(ABOUT), {name: found})
            Path(command[command.index("--out") + 1]).write_text(json.dumps(result))
        return SimpleNamespace(returncode=0)

    monkeypatch.setattr(gpu_gate, "cards_here", lambda: ["0", "1"])
    monkeypatch.setattr(gpu_gate, "missing", lambda: fake.missing)
    monkeypatch.setattr(gpu_gate, "ALL", {"tests": 2, "suites": 2})
    monkeypatch.setattr(gpu_gate.shutil, "copytree", lambda source, copy, ignore: copy.mkdir())
    monkeypatch.setattr(gpu_gate.subprocess, "run", run)
    return fake


def test_all_gpus_share_the_parts_and_a_second_call_runs_what_is_left(two_gpus, tmp_path, capsys):
    assert two_gpus.main("--begin", "-1") == 3 and not two_gpus.ran
    two_gpus.outcome["tests:2/2"] = "killed"
    assert two_gpus.main() == 3
    assert sorted(part for _, part in two_gpus.ran) == ["suites:1/2", "suites:2/2", "tests:1/2", "tests:2/2"]
    assert "left: tests:2/2" in capsys.readouterr().out
    two_gpus.outcome.clear()
    two_gpus.ran.clear()
    assert two_gpus.main() == 0 and [part for _, part in two_gpus.ran] == ["tests:2/2"]
    merged = json.loads((tmp_path / "merged.json").read_text())
    assert merged["good"] and merged["tests"]["passed"] == 10 and not merged["unfinished"]


def test_a_folder_holds_parts_of_one_commit(two_gpus, capsys):
    assert two_gpus.main() == 0
    two_gpus.ran.clear()
    with pytest.raises(SystemExit):
        two_gpus.main("--commit", "b")
    assert "got a part of a, allowed: of b" in capsys.readouterr().err and not two_gpus.ran


def test_what_stops_a_gpu_is_raised(two_gpus, monkeypatch):
    import gpu_gate

    def full(source, copy, ignore):
        raise OSError("no space")

    monkeypatch.setattr(gpu_gate.shutil, "copytree", full)
    with pytest.raises(OSError, match="no space"):
        two_gpus.main()


def test_a_part_that_is_not_good_shows_in_the_end(two_gpus):
    two_gpus.outcome["suites:2/2"] = of_suites(code=1)
    assert two_gpus.main() == 1
    assert {card for card, _ in two_gpus.ran} <= {"0", "1"}


def test_nothing_runs_where_something_is_missing(two_gpus, capsys):
    two_gpus.missing.append("xdist: no module")
    assert two_gpus.main() == 2 and not two_gpus.ran
    assert capsys.readouterr().out == "missing: xdist: no module\n"


def test_what_is_missing_is_named(monkeypatch, tmp_path):
    import gpu_gate

    monkeypatch.setattr(gpu_gate, "NEEDED", ("json", "no_such_module"))
    monkeypatch.delenv("PEERS_DIR", raising=False)
    first, *_, last = gpu_gate.missing()
    assert first == "no_such_module: No module named 'no_such_module'"
    assert last == "PEERS_DIR: not set, so nothing would be measured beside peers"
    monkeypatch.setenv("PEERS_DIR", str(tmp_path))
    assert gpu_gate.missing()[-1].startswith(f"PEERS_DIR: got {tmp_path}")
    (tmp_path / "vllm").mkdir()
    assert gpu_gate.missing()[-1].startswith("PEERS_DIR: DeepGEMM does not run: ")


def test_tests_go_first_and_then_suites_alone_the_longest_before_others(two_gpus, monkeypatch):
    import gpu_gate

    monkeypatch.setattr(gpu_gate, "cards_here", lambda: ["0"])
    monkeypatch.setattr(gpu_gate, "durations", lambda: {"load": 9000, "test_topk.py": 5000, "test_cli.py": 4000})
    assert two_gpus.main() == 0
    ran = [part for _, part in two_gpus.ran]
    assert sorted(ran[:2]) == ["tests:1/2", "tests:2/2"] and ran[2:] == ["suites:1/2", "suites:2/2"]


@pytest.mark.parametrize("reports, hangs", [(0, False), (3, False), (0, True)])
def test_what_a_sanitizer_finds_is_recorded(reports, hangs, tmp_path, monkeypatch, capsys):
    """By tool and file: reports of all processes, tests, and whether it came to an end; another tool's stay."""
    import gpu_gate
    import sanitize

    (tmp_path / "compute-sanitizer").write_text(
        f"""#!{sys.executable}
import sys, time
(log,) = [one.partition("=")[2] for one in sys.argv if one.startswith("--log-file=")]
for process in (1, 2):
    with open(log.replace("%p", str(process)), "w") as file:
        file.write("========= COMPUTE-SANITIZER\\n")
        file.write("========= Invalid __global__ read of size 4 bytes\\n=========     at attend+0x50 in a.py:7\\n" * {reports})
print("tests/test_a.py::test_b[a b] PASSED [50%]\\ntests/test_a.py::test_c SKIPPED (why)", flush=True)
time.sleep({60 if hangs else 0})
"""
    )
    (tmp_path / "compute-sanitizer").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setattr(gpu_gate, "about_this", lambda *_: dict(ABOUT))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    out = tmp_path / "found.json"
    out.write_text(json.dumps({**ABOUT, "tools": {"racecheck": {"test_a.py": {"passed": 7}}}}))
    arguments = ["--tool", "memcheck", "--out", str(out), "--logs", str(tmp_path / "logs"), "--seconds", "3"]
    assert sanitize.main([*arguments, "tests/test_a.py", "tests/test_d.py"]) == (1 if reports or hangs else 0)
    tools = json.loads(out.read_text())["tools"]
    assert tools["racecheck"] == {"test_a.py": {"passed": 7}} and tools["memcheck"].keys() == {"test_a.py", "test_d.py"}
    for found in tools["memcheck"].values():
        assert (found["reports"], found["finished"]) == (2 * reports, not hangs)
        assert (found["passed"], found["failed"]) == (1, 0)
        assert found["places"] == (["attend+0x50 in a.py:7"] if reports else [])


def test_every_file_that_the_sanitizer_takes_by_itself_is_there():
    import sanitize

    assert {f"test_{name}.py" for name in sanitize.HOPPER} | {Path(sanitize.EXPERTS[0]).name} <= TESTS
