#!/usr/bin/env python
"""Time steps of the split attention kernels in many ways on this machine's GPU, and fit the constants of split_kv.py.

    python scripts/fit_costs.py --measure scripts/results/costs.json     # on a GPU, under four minutes; then fits
    python scripts/fit_costs.py --fit scripts/results/costs.json         # from such a file, anywhere

Of each form of a kernel, steps of many numbers of rows are launched in several ways: in one launch with different
splits, or with a tail of its own, and with the combine starting early or not. Printed are the constants that stand in
split_kv.py and those that fit best, with the errors of both:

    cost    rms of (time / cost) within the ways of a step, in percent: where it is 0, the model orders all ways rightly
    lost    how much longer the ways take that a model prefers, than the fastest ones that were timed: mean and worst
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT)]

from sparse_attn.framework.dispatch import Choice, find  # noqa: E402
from sparse_attn.framework.target import TARGETS, Target  # noqa: E402
from sparse_attn.layout import LatentFp8Layout, PlanarFp8Layout  # noqa: E402
from sparse_attn.ops.attention.sparse import dispatch  # noqa: E402
from sparse_attn.ops.attention.sparse.hopper.constants import BLOCK_M, BLOCK_N, D_V  # noqa: E402
from sparse_attn.ops.attention.sparse.partials import scratch  # noqa: E402
from sparse_attn.ops.attention.sparse.problem import Problem  # noqa: E402
from sparse_attn.ops.attention.sparse.split_kv import (  # noqa: E402
    EARLY_START,
    PAIRS,
    TILES,
    CostModel,
    EarlyStart,
    Waves,
    combine_of,
    may_start_early,
    waves_of,
)

LAYOUTS = {layout.name: layout for layout in (LatentFp8Layout(512, 64), PlanarFp8Layout(448, 64))}
LATENT, PLANAR = LAYOUTS
SLOTS = 1 << 20  # of a cache that no L2 holds
ROWS = (1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 34, 40, 45, 56, 66, 67, 72, 80, 100, 133, 150, 200)
MOST_WAYS = 5  # of a step, beside the one that is taken


class Kind(NamedTuple):
    """A kernel whose launches a model of split_kv.py prices, with the name it has there."""

    name: str
    model: CostModel
    unit: int  # keys
    heads: int | None  # of a CTA; None: all
    scaled: bool  # partials


KINDS = {
    "hopper.decode_fp8": Kind("PAIRS", PAIRS, 2 * BLOCK_N, BLOCK_M, True),
    "hopper.swap_ab": Kind("TILES", TILES, BLOCK_N, None, False),
}


class Form(NamedTuple):
    """Steps that differ in their rows alone. keys: of each row."""

    kernel: str
    heads: int
    keys: int
    layout: str

    @property
    def blocks(self) -> int:
        """CTAs for each row and split."""
        heads = KINDS[self.kernel].heads
        return 1 if heads is None else self.heads // heads

    @property
    def units(self) -> int:
        return -(-self.keys // KINDS[self.kernel].unit)


FORMS = (
    Form("hopper.decode_fp8", 128, 2048, LATENT), Form("hopper.decode_fp8", 64, 2048, LATENT),
    Form("hopper.decode_fp8", 128, 640, PLANAR), Form("hopper.swap_ab", 16, 2048, LATENT),
    Form("hopper.swap_ab", 32, 1152, PLANAR),
)  # fmt: skip


class Point(NamedTuple):
    """A step as it was launched. early: whether each launch let the next one start. us: what it took."""

    form: Form
    rows: int
    waves: tuple[Waves, ...]
    early: bool
    us: float = math.nan

    @property
    def splits(self) -> list[int]:
        """Of the launches whose rows are split."""
        return [some.splits for some in self.waves if some.splits > 1]

    @property
    def ctas(self) -> int:
        """Of the first launch."""
        return self.waves[0].rows * self.waves[0].splits * self.form.blocks


# --- what is launched


def points(num_sms: int) -> Iterator[Point]:
    """Every step, in every way that is timed."""
    for form, rows in itertools.product(FORMS, ROWS):
        for waves in ways(form, rows, num_sms):
            one = Point(form, rows, waves, True)
            # Where nothing is combined, or a tail follows, an early start always pays.
            yield from (one, one._replace(early=False)) if one.splits and len(waves) == 1 else (one,)


def ways(form: Form, rows: int, num_sms: int) -> list[tuple[Waves, ...]]:
    """Ways to launch ``rows``: the one that is taken, and at most MOST_WAYS others, spread over those that might be."""
    taken = waves_of(KINDS[form.kernel].model, rows, form.blocks, form.units, num_sms)
    ctas = rows * form.blocks
    even = sorted({-(-form.units // longest) for longest in range(1, form.units + 1)})  # no split gets nothing
    some = [splits for splits in even if splits == 1 or ctas * splits <= 2 * num_sms]
    found = [(Waves(0, rows, splits),) for splits in some]
    for splits in some:
        first = ctas * splits // num_sms * num_sms // (splits * form.blocks)
        tail = rows - first
        if 0 < first < rows:
            fit = [more for more in even if more > splits and tail * form.blocks * more <= num_sms]
            found += [(Waves(0, first, splits), Waves(first, tail, more)) for more in (splits, *fit[-1:])]
    others = [waves for waves in dict.fromkeys(found) if waves != taken]
    count = min(MOST_WAYS, len(others))
    return [taken, *(others[at * (len(others) - 1) // max(1, count - 1)] for at in range(count))]


def choice(point: Point, problem: Problem, target: Target) -> Choice:
    """The kernel with a plan that launches a step so."""
    kernel, kind = find(dispatch.KERNELS, point.form.kernel), KINDS[point.form.kernel]
    split = sum(some.rows for some in point.waves if some.splits > 1)
    plan = replace(
        kernel.plan(problem, target), waves=point.waves, launch_dependents=point.early,
        combine=combine_of(target, split, point.form.heads, *point.splits) if split else None,
        scratch=scratch(point.waves, point.form.heads, D_V, kind.scaled),
    )  # fmt: skip
    return Choice(kernel, plan)


def measure() -> dict:
    """Times of every point on this GPU, with cold caches."""
    import torch
    import triton
    from gpu_gate import revision

    from sparse_attn.framework.target import target_of

    target = target_of(torch.device("cuda", torch.cuda.current_device()))
    caches = {name: _cache(layout) for name, layout in LAYOUTS.items()}
    torch.manual_seed(0)
    timed = [point._replace(us=_time(point, caches[point.form.layout], target)) for point in points(target.num_sms)]
    return {
        "commit": revision(None)[0],
        "gpu": torch.cuda.get_device_name(),
        "num_sms": target.num_sms,
        "versions": {"torch": torch.__version__, "triton": triton.__version__},
        "points": timed,
    }


def _cache(layout):
    import torch

    from sparse_attn.cache import allocate_cache

    cache = allocate_cache(layout, SLOTS // 64, 64, "cuda")
    for part in cache.split(1 << 10):
        values = torch.randn(part.shape[0] * 64, layout.dim, dtype=torch.float32, device="cuda")
        layout.encode(part, torch.arange(values.shape[0], device="cuda"), values)
    return cache


def _time(point: Point, cache, target: Target) -> float:
    from sparse_attn.testing import timing

    footprint = point.rows * point.form.keys * cache.shape[-1] * cache.element_size()
    return timing.time_graph(calls(point, cache, target, timing.rotations(footprint)), target_ms=4.0)


def calls(point: Point, cache, target: Target, sets: int) -> list[Callable[[], object]]:
    """The step with so many sets of inputs, on the cache's device."""
    import torch

    from sparse_attn.ops.attention.sparse.launch import sparse_attn_decode

    form, rows, device = point.form, point.rows, cache.device
    q = torch.randn(sets, rows, form.heads, LAYOUTS[form.layout].dim, device=device, dtype=torch.bfloat16)
    indices = torch.randint(SLOTS, (sets, rows * form.keys), device=device, dtype=torch.int32)
    indptr = torch.arange(rows + 1, device=device, dtype=torch.int32) * form.keys
    scale = LAYOUTS[form.layout].dim ** -0.5
    problem = dispatch.decode_problem(q[0], cache, indices[0], indptr, scale, form.layout)
    forced = choice(point, problem, target)

    def call(index: int) -> Callable[[], object]:
        arguments = q[index], cache, indices[index], indptr, scale, form.layout, None, None, None, "", None
        return lambda: sparse_attn_decode(*arguments, kernel=forced)

    return [call(index) for index in range(sets)]


# --- what fits


def steps(timed: Iterable[Point]) -> list[list[Point]]:
    """The points of each step, one for each way: the faster of early and late."""
    best: dict[tuple[Form, int], dict[tuple[Waves, ...], Point]] = {}
    for point in timed:
        ways_of = best.setdefault((point.form, point.rows), {})
        if point.waves not in ways_of or point.us < ways_of[point.waves].us:
            ways_of[point.waves] = point
    return [list(found.values()) for found in best.values() if len(found) > 1]


def cost_error(model: CostModel, batches: list[list[Point]], num_sms: int) -> float:
    """rms of log(time / cost) about its mean within a step."""
    squares = []
    for batch in batches:
        logs = [math.log(point.us / _cost(model, point, num_sms)) for point in batch]
        mean = sum(logs) / len(logs)
        squares += [(one - mean) ** 2 for one in logs]
    return math.sqrt(sum(squares) / len(squares))


def lost(model: CostModel, batches: list[list[Point]], num_sms: int) -> list[float]:
    """By step, how much longer the way takes that costs least, than the fastest."""
    taken = [min(batch, key=lambda point: _cost(model, point, num_sms)) for batch in batches]
    return [one.us / min(point.us for point in batch) - 1 for one, batch in zip(taken, batches)]


def _cost(model: CostModel, point: Point, num_sms: int) -> float:
    return model.cost(point.waves, point.form.blocks, point.form.units, num_sms)


def fitted(model: CostModel, batches: list[list[Point]], num_sms: int) -> CostModel:
    """The constants of least cost_error, in steps of a twentieth: downhill from ``model``'s."""
    names = ("start", "full_wave", "combine")
    best, error = model, cost_error(model, batches, num_sms)
    for step in (1.0, 0.5, 0.2, 0.1, 0.05):
        improved = True
        while improved:
            improved, centre = False, best
            for signs in itertools.product((-step, 0, step), repeat=3):
                near = {name: round(max(0.0, getattr(centre, name) + sign), 2) for name, sign in zip(names, signs)}
                if (found := cost_error(tried := centre._replace(**near), batches, num_sms)) < error:
                    best, error, improved = tried, found, True
    return best


Pair = tuple[Point, Point]  # early, late


def starts(timed: Iterable[Point]) -> list[Pair]:
    """Steps of one launch and its combine that were timed both ways."""
    by_way: dict[tuple[Form, int, tuple[Waves, ...]], dict[bool, Point]] = {}
    for point in timed:
        by_way.setdefault((point.form, point.rows, point.waves), {})[point.early] = point
    return [(both[True], both[False]) for both in by_way.values() if len(both) == 2]


def lost_starts(limits: EarlyStart, pairs: list[Pair], target: Target) -> list[float]:
    """By step, how much longer it takes as ``limits`` start it, than the other way if that is faster."""
    found = []
    for early, late in pairs:
        combine = combine_of(target, early.rows, early.form.heads, *early.splits)
        taken = early if may_start_early(target, early.ctas, combine, limits) else late
        found.append(taken.us / min(early.us, late.us) - 1)
    return found


def fitted_start(pairs: list[Pair], target: Target) -> EarlyStart:
    """The limits with the least loss; of several those that are nearest to EARLY_START."""

    def rank(limits: EarlyStart) -> tuple[float, float]:
        away = sum(abs(math.log(one / now)) for one, now in zip(limits, EARLY_START))
        return round(sum(lost_starts(limits, pairs, target)), 9), away

    grid = itertools.product((2, 4, 6, 8, 10, 12, 16, 24, 32), (20, 30, 40, 60, 80, 120), (4, 6, 8, 10, 12, 16, 24))
    return min((EarlyStart(*limits) for limits in grid), key=rank)


def report(result: dict) -> list[str]:
    """The constants there are and those that fit, with their errors."""
    num_sms = result["num_sms"]
    target = replace(TARGETS["sm_90"], num_sms=num_sms)
    lines = [f"{result['gpu']}, {result['versions']}: {len(result['points'])} points"]
    for kernel, kind in KINDS.items():
        batches = steps(point for point in result["points"] if point.form.kernel == kernel)
        if not batches:
            lines.append(f"{kind.name}: no step was timed in several ways")
            continue
        for label, model in (("now", kind.model), ("fits", fitted(kind.model, batches, num_sms))):
            constants = f"start {model.start}, full_wave {model.full_wave}, combine {model.combine}"
            error = 100 * cost_error(model, batches, num_sms)
            lines.append(_line(kind.name, label, constants, f"cost {error:.1f}%", lost(model, batches, num_sms)))
    if pairs := starts(result["points"]):
        for label, limits in (("now", EARLY_START), ("fits", fitted_start(pairs, target))):
            constants = f"few {limits.few}, crowd {limits.crowd}, many {limits.many}"
            lines.append(_line("EARLY_START", label, constants, "", lost_starts(limits, pairs, target)))
    return lines


def _line(name: str, label: str, constants: str, error: str, losses: list[float]) -> str:
    worst = f"lost {100 * sum(losses) / len(losses):.2f}%, at most {100 * max(losses):.1f}%, {len(losses)} steps"
    return f"{name:<12} {label:<5} {constants:<48} {error:<12} {worst}"


# --- files


def write(result: dict, path: Path) -> None:
    """One point a line."""
    rows = [
        json.dumps([*point.form, point.rows, point.waves, point.early, round(point.us, 2)])
        for point in result["points"]
    ]
    head = json.dumps({key: value for key, value in result.items() if key != "points"})
    path.write_text(head[:-1] + ', "points": [\n' + ",\n".join(rows) + "\n]}\n")


def read(path: Path) -> dict:
    result = json.loads(path.read_text())
    result["points"] = [
        Point(Form(*row[:4]), row[4], tuple(Waves(*some) for some in row[5]), *row[6:]) for row in result["points"]
    ]
    return result


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    group = parser.add_mutually_exclusive_group(required=True)
    group.add_argument("--measure", type=Path, metavar="FILE", help="write the times there, and fit")
    group.add_argument("--fit", type=Path, metavar="FILE", help="fit from the times there")
    options = parser.parse_args(arguments)
    if options.measure:
        import torch

        if not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0):
            parser.error("--measure: these kernels run on a GPU of sm_90, and there is none here")
        write(measure(), options.measure)
    print("\n".join(report(read(options.measure or options.fit))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
