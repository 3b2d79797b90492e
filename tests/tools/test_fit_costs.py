"""scripts/fit_costs.py without a GPU: what it launches, and what it fits to times that are made up."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sparse_attn.framework.target import TARGETS
from sparse_attn.ops.attention.sparse.split_kv import EarlyStart, combine_of, may_start_early

TARGET = replace(TARGETS["sm_90"], num_sms=132)


@pytest.fixture(autouse=True)
def scripts_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "scripts"))


def made_up(us):
    """All points, with times that a function gives."""
    import fit_costs

    points = [point._replace(us=us(point)) for point in fit_costs.points(TARGET.num_sms)]
    return {"gpu": "none", "num_sms": TARGET.num_sms, "versions": {}, "points": points}


def test_every_row_is_launched_once_and_every_split_has_keys():
    import fit_costs

    points = list(fit_costs.points(TARGET.num_sms))
    assert len(set(points)) == len(points) > 500
    for point in points:
        ends = [some.first + some.rows for some in point.waves]
        assert [some.first for some in point.waves] == [0, *ends[:-1]] and ends[-1] == point.rows
        for some in point.waves:
            longest = -(-point.form.units // some.splits)
            assert (some.splits - 1) * longest < point.form.units


@pytest.mark.parametrize("form", range(5))
def test_steps_are_launched_as_they_are_noted(form):
    import fit_costs

    from sparse_attn.testing.launches import recording

    form = fit_costs.FORMS[form]
    layout = fit_costs.LAYOUTS[form.layout]
    cache = torch.empty(700, 64, layout.row, dtype=layout.dtype, device="meta")
    points = [point for point in fit_costs.points(TARGET.num_sms) if point.form == form and point.rows in (1, 67, 100)]
    assert {len(point.waves) for point in points} == {1, 2}
    for point in points:
        with recording("sm_90") as launches:
            fit_costs.calls(point, cache, TARGETS["sm_90"], 2)[1]()
        kernels = [f"{launch.module}.{launch.kernel}".rpartition("attention.sparse.")[2] for launch in launches]
        combine = ["hopper.combine.combine"] if point.splits else []
        assert kernels == [f"{form.kernel}.attend"] * len(point.waves) + combine


def test_constants_are_found_again():
    """Of times that a model with others makes, in microseconds of its own for each form."""
    import fit_costs

    from sparse_attn.ops.attention.sparse.split_kv import PAIRS, TILES

    true = {"hopper.decode_fp8": PAIRS._replace(start=2.3, full_wave=0.4, combine=1.75),
            "hopper.swap_ab": TILES._replace(start=1.1, full_wave=3.2, combine=0.6)}  # fmt: skip
    result = made_up(lambda point: point.form.heads * fit_costs._cost(true[point.form.kernel], point, TARGET.num_sms))
    for kernel, kind in fit_costs.KINDS.items():
        batches = fit_costs.steps(point for point in result["points"] if point.form.kernel == kernel)
        assert fit_costs.cost_error(kind.model, batches, TARGET.num_sms) > 0.02
        found = fit_costs.fitted(kind.model, batches, TARGET.num_sms)
        assert found == true[kernel] and not any(fit_costs.lost(found, batches, TARGET.num_sms))


def test_early_starts_are_found_again():
    import fit_costs

    limits = EarlyStart(6, 60, 8)

    def us(point):
        if not point.splits or len(point.waves) > 1:
            return 10.0
        combine = combine_of(TARGET, point.rows, point.form.heads, *point.splits)
        return 10.0 if may_start_early(TARGET, point.ctas, combine, limits) == point.early else 11.0

    pairs = fit_costs.starts(made_up(us)["points"])
    assert any(fit_costs.lost_starts(EarlyStart(10, 40, 12), pairs, TARGET))
    found = fit_costs.fitted_start(pairs, TARGET)
    assert not any(fit_costs.lost_starts(found, pairs, TARGET)) and found.few == 6


def test_a_file_of_times_comes_to_constants_and_errors(tmp_path, capsys):
    import fit_costs

    path, result = tmp_path / "costs.json", made_up(lambda point: 5.0 + point.rows / 7)
    fit_costs.write(result, path)
    assert fit_costs.read(path)["points"] == [one._replace(us=round(one.us, 2)) for one in result["points"]]
    assert fit_costs.main(["--fit", str(path)]) == 0
    said = capsys.readouterr().out.splitlines()
    assert [line.split()[:2] for line in said[1:]] == [
        [name, which] for name in ("PAIRS", "TILES", "EARLY_START") for which in ("now", "fits")
    ]
    assert "start 1.2, full_wave 0.85, combine 0.8" in said[1] and "few 10, crowd 40, many 12" in said[5]


def test_measuring_needs_a_gpu(tmp_path, capsys, monkeypatch):
    import fit_costs

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        fit_costs.main(["--measure", str(tmp_path / "costs.json")])
    assert "a GPU of sm_90, and there is none here" in capsys.readouterr().err
