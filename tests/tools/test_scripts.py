"""The parts of the gate and of the benchmark frame that need no GPU, and whether mutations still fit the source."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


def test_gate_reads_junit(tmp_path):
    from gpu_gate import read_junit, slug

    report = tmp_path / "junit.xml"
    report.write_text(
        '<testsuites><testsuite><testcase name="plain" classname="tests.ops.test_a" time="1.2"/>'
        '<testcase name="soak" classname="tests.ops.test_a.TestIt" time="0.8"><properties><property name="steps" value="9"/>'
        '</properties></testcase><testcase name="a" classname="test_b" time="0.9"><failure/></testcase>'
        '<testcase name="tests.ops.test_c" classname="" time="0"><error/></testcase>'
        '<testcase name="b[1.5]" classname="tests.ops.test_b"><skipped message="needs 2 GPUs"/></testcase>'
        '<testcase name="c" classname="tests.ops.test_b"><skipped message="needs a GPU"/></testcase></testsuite></testsuites>'
    )
    found = read_junit(report)
    assert found["tests"] == {"passed": 2, "failed": 2, "skipped": 1} and found["reports"] == {"soak": {"steps": "9"}}
    assert found["deselected"] == {"tests/ops/test_b.py::b[1.5]": "needs 2 GPUs"}
    assert found["seconds_of"] == {"test_a.py": 2.0}
    assert read_junit(tmp_path / "absent.xml")["tests"] == {"passed": 0, "failed": 0, "skipped": 0}
    assert slug("NVIDIA H200") == "nvidia-h200"


def test_gate_takes_the_commit_it_is_given():
    from gpu_gate import revision

    assert revision("abc")[0] == "abc"


def test_record_and_registry():
    from benchmarks.record import Record
    from benchmarks.registry import all_suites, suite

    record = Record("case", 10.0, peer="theirs", peer_us=25.0, floor_us=4.0)
    assert record.as_dict("s") == {
        "suite": "s", "case": "case", "us": 10.0, "peer": "theirs", "peer_us": 25.0, "ratio": 2.5, "floor_us": 4.0,
    }  # fmt: skip
    assert Record("case", 1.0).as_dict("s")["ratio"] is None
    with pytest.raises(ValueError, match="registered twice"):
        suite(next(iter(all_suites())))(lambda: iter(()))


@pytest.mark.parametrize("name", ["us", "peer_us"])
@pytest.mark.parametrize("us", [-0.001, float("nan")])
def test_no_negative_time_is_recorded(name, us):
    from benchmarks.record import Record

    with pytest.raises(ValueError, match=rf"^{name}: got {us}, allowed: 0 or more \(a case\)$"):
        Record(**{"case": "a case", "us": 0.0, name: us})


def test_bench_row_fits_missing_numbers():
    from bench import shown
    from benchmarks.record import Record

    assert "case" in shown(Record("case", 1.0).as_dict("s"))
    assert "peer" in shown(Record("case", 0.0, "peer", 2.0).as_dict("s"))


def test_every_operator_has_a_mutation():
    from mutate import mutations

    from sparse_attn.framework.registration import OPERATORS

    mutated = {".".join(folder.parts) for bug in mutations() for folder in Path(bug.file).parents}
    assert OPERATORS and {call.__module__ for call in OPERATORS.values()} <= mutated


def test_mutations_fit_the_source():
    from mutate import ROOT, mutations

    assert len({bug.name for bug in mutations()}) == len(mutations())
    for bug in mutations():
        source = (ROOT / bug.file).read_text()
        assert bug.applied(source) != source and bug.tests and bug.on in ("", "interpreter", "gpu")
        for test in bug.tests:
            path, name = test.split("::")
            assert f"def {name.partition('[')[0]}(" in (ROOT / path).read_text(), test


@pytest.mark.parametrize("source", ["a = 2\n", "a = 1\na = 1\n"])
def test_a_mutation_must_fit_once(source):
    from mutate import mutation

    bug = mutation("bug: what it is\nfile f.py\ntest t.py::t\non gpu\n-a = 1\n-\n+a = 2\n+b\n+")
    assert bug == ("bug", "what it is", "f.py", "a = 1\n", "a = 2\nb\n", ("t.py::t",), "gpu")
    assert bug.applied("x\na = 1\n") == "x\na = 2\nb\n"
    with pytest.raises(ValueError, match=r"mutation bug: 'a = 1.n' occurs [02] times in f.py, allowed: once"):
        bug.applied(source)
    with pytest.raises(ValueError, match="got by, allowed: file, test, on, - and +"):
        mutation("bug: what it is\nfile f.py\nby t.py::t")


def test_only_a_test_that_failed_has_caught_a_mutation():
    from mutate import verdict

    def failed(word, how):
        lines = f"tests/test_a.py::test_b[0] PASSED [ 50%]\ntests/test_a.py::test_b[x - y] {word} [100%]\n"
        return (
            f"{lines}=== short test summary info ===\n{word} tests/test_a.py::test_b[x - y] - {how}\n!!! stopping !!!\n"
        )

    for word in ("FAILED", "ERROR"):  # a fixture that looks afterwards is an error
        assert verdict(1, failed(word, "assert [1] == [2]")) == ("tests/test_a.py::test_b[x - y]", "assert [1] == [2]")
    crash = "tests/test_a.py::test_b[0] PASSED [ 50%]\ntests/test_a.py::test_c Fatal Python error: Segmentation fault\n"
    assert verdict(-11, crash) == ("tests/test_a.py::test_c", "SIGSEGV")
    for code, output in (
        (0, "1 passed"), (2, "interrupted"), (4, "not found"), (5, "no tests ran"), (124, ""), (-9, crash), (-11, ""), (1, ""),
        (1, failed("FAILED", "NameError: name 'a' is not defined")),
    ):  # fmt: skip
        assert verdict(code, output)[0] is None, (code, output)


def test_long_reaches_every_stage_and_no_pytest(tmp_path):

    python = tmp_path / "python"
    python.write_text('#!/bin/sh\necho "long=$SPARSE_ATTN_LONG interpreted=$TRITON_INTERPRET $*"\n')
    python.chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(python)}
    for arguments, long in ((["--long", "-k", "a b"], "1"), (["-k", "a b"], "")):
        command = [SCRIPTS / "test.sh", *arguments]
        said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
        stages = [line for line in said.splitlines() if "pytest" in line]
        assert len(stages) >= 3 and all(line.startswith(f"long={long} ") for line in stages)
        assert any("interpreted=1" in line for line in stages)
        assert all(line.endswith(" -k a b") and "--long" not in line for line in stages)


def test_a_missing_checker_fails_where_test_sh_makes_the_environment(tmp_path):
    """And is left out in an environment of one's own."""

    (tmp_path / "scripts").mkdir()
    for name in ("test.sh", "environment.sh", "constraints.txt"):
        shutil.copy(SCRIPTS / name, tmp_path / "scripts")
    shutil.copy(SCRIPTS.parent / "setup.cfg", tmp_path)
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\ncase "$*" in *ruff*) exit 1;; esac\n')
    python.chmod(0o755)
    made = "cat setup.cfg scripts/constraints.txt | cksum >.venv/installed"
    subprocess.run(made, shell=True, cwd=tmp_path, check=True)
    for environment, failed in (({}, True), ({"PYTHON": str(python)}, False)):
        environment |= {"PATH": os.environ["PATH"]}
        done = subprocess.run([tmp_path / "scripts" / "test.sh"], env=environment, capture_output=True, text=True)
        assert done.returncode == failed and ("FAILED: lint\n" in done.stderr) == failed, done.stderr


def in_a_clone(tmp_path):
    """A folder with the shell scripts, and a python3 that notes what it is asked and makes a .venv of itself."""
    (tmp_path / "clone" / "scripts").mkdir(parents=True)
    for name in ("demo.sh", "test.sh", "environment.sh", "constraints.txt"):
        shutil.copy(SCRIPTS / name, tmp_path / "clone" / "scripts")
    shutil.copy(SCRIPTS.parent / "setup.cfg", tmp_path / "clone")
    python = tmp_path / "python3"
    python.write_text(
        f'#!/bin/sh\necho "$*" >>{tmp_path}/asked\n'
        f'[ "$2" = venv ] && mkdir -p "$3/bin" && cp {python} "$3/bin/python"\nexit 0\n'
    )
    python.chmod(0o755)
    return {"PATH": f"{tmp_path}:{os.environ['PATH']}"}


def test_the_demo_installs_what_it_needs_and_says_so_before(tmp_path):
    environment, asked = in_a_clone(tmp_path), tmp_path / "asked"

    def ran(script):
        asked.write_text("")
        done = subprocess.run(
            [tmp_path / "clone" / "scripts" / script], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        installed = [line.split("--use-pep517 ")[1] for line in asked.read_text().splitlines() if "pep517" in line]
        return installed, done.stderr, asked.read_text()

    installed, said, calls = ran("demo.sh")
    assert installed == ["-e . safetensors tqdm"]
    assert re.search(r"5\.3 GB on disk\).*minutes.*CPU build.*PYTHON=cpu/bin/python scripts/demo.sh", said, re.DOTALL)
    assert calls.endswith("-m sparse_attn info --short\n-m sparse_attn generate --max-new-tokens 64\n")
    assert ran("demo.sh")[:2] == ([], "")
    assert ran("test.sh")[0] == ["-e .[models,test]"]
    (tmp_path / "clone" / ".venv" / "installed-demo").unlink()
    assert ran("demo.sh")[:2] == ([], "")  # what the tests take is more


def test_the_demo_names_what_an_environment_lacks(tmp_path):
    (tmp_path / "python").write_text("#!/bin/sh\necho safetensors\n")
    (tmp_path / "python").chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(tmp_path / "python")}
    done = subprocess.run([SCRIPTS / "demo.sh"], env=environment, capture_output=True, text=True)
    said = f"{tmp_path}/python lacks safetensors: {tmp_path}/python -m pip install safetensors\n"
    assert (done.returncode, done.stderr) == (1, said)


def test_test_sh_says_its_stages_and_how_long_they_take(tmp_path):
    environment = in_a_clone(tmp_path)
    said = subprocess.run(
        [tmp_path / "clone" / "scripts" / "test.sh"], env=environment, capture_output=True, text=True
    ).stdout
    stages = re.findall(r"^== ([\w-]+)$", said, re.MULTILINE)
    minutes = re.findall(r"([a-z-]+) \d", said.split("cores:")[1].split(".")[0].replace("\n", " "))
    assert stages == minutes == ["lint", "plain", "other-defaults", "interpreted", "ahead-of-time"]
    assert re.findall(r"^== ([\w-]+) took \d+ s$", said, re.MULTILINE) == stages
