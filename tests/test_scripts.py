"""The parts of the gate and of the benchmark frame that need no GPU."""

from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent.parent / "scripts"


@pytest.fixture(autouse=True)
def scripts_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(SCRIPTS))


def test_gate_reads_junit(tmp_path):
    from gpu_gate import counts, slug

    report = tmp_path / "junit.xml"
    report.write_text(
        '<testsuites><testsuite name="pytest" tests="7" failures="1" errors="1" skipped="2"></testsuite></testsuites>'
    )
    assert counts(report) == {"passed": 3, "failed": 2, "skipped": 2}
    assert counts(tmp_path / "absent.xml") == {"passed": 0, "failed": 0, "skipped": 0}
    assert slug("NVIDIA H200") == "nvidia-h200"


def test_gate_takes_the_commit_it_is_given():
    from gpu_gate import revision

    assert revision("abc")[0] == "abc"


def test_record_and_registry():
    from benchmarks.registry import Record, all_suites, suite

    record = Record("case", 10.0, peer="theirs", peer_us=25.0, floor_us=4.0)
    assert record.as_dict("s") == {
        "suite": "s", "case": "case", "us": 10.0, "peer": "theirs", "peer_us": 25.0, "ratio": 2.5, "floor_us": 4.0,
    }  # fmt: skip
    assert Record("case", 1.0).as_dict("s")["ratio"] is None
    with pytest.raises(ValueError, match="registered twice"):
        suite(next(iter(all_suites())))(lambda: iter(()))


def test_bench_row_fits_missing_numbers():
    from bench import _row
    from benchmarks.registry import Record

    assert "case" in _row(Record("case", 1.0).as_dict("s"))
