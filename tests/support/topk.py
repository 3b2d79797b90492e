"""Rows of scores of every kind, and every algorithm of the selection with a plan that small rows take whole."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from support.extremes import INF, INT_MAX, INT_MIN, NAN

from sparse_attn.framework.dispatch import Choice, find
from sparse_attn.ops.topk.select import dispatch
from sparse_attn.ops.topk.select.fake import GROUP
from sparse_attn.ops.topk.select.plan import (
    THRESHOLDS,
    Appended,
    Bound,
    GroupMaxima,
    MultiCta,
    MultiPass,
    Plan,
    Sampled,
    SingleCta,
    SingleCtaBf16,
    Streaming,
)


def brute_force(logits, starts, ends, k):
    """One row at a time with Python's own sort."""
    rows, width = logits.shape
    out = torch.full((rows, k), -1, dtype=torch.int32)
    for row in range(rows):
        start = 0 if starts is None else min(max(int(starts[row]), 0), width)
        end = width if ends is None else min(max(int(ends[row]), 0), width)
        values = logits[row].tolist()
        choice = [c for c in range(start, end) if not math.isnan(values[c]) and values[c] != -INF]
        choice = sorted(sorted(choice, key=lambda c: -values[c])[:k])  # Python's sort is stable and has -0.0 == 0.0
        out[row, : len(choice)] = torch.tensor([c - start for c in choice], dtype=torch.int32)
    return out


def scores(kind, rows, width, seed=0):
    """fp32 [rows, width] of one of several shapes of distribution."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, width, generator=generator)
    if kind == "relu":  # a plateau of exact zeros, both signs of zero, above and below it
        x = torch.where(x.abs() < 0.8, torch.where(x > 0, 0.0, -0.0), x)
    elif kind == "grid":
        x = (x * 2).round() / 2
    elif kind == "equal":
        x = torch.full_like(x, 1.5)
    elif kind == "zeros":
        x = torch.where(x > 0, 0.0, -0.0)
    elif kind == "ascending":
        x = x.sort(1).values
    elif kind == "descending":
        x = x.sort(1, descending=True).values
    elif kind == "special":
        pick = torch.randint(0, 8, x.shape, generator=generator)
        for code, value in enumerate((NAN, -INF, INF, 0.0, -0.0, torch.finfo(torch.float32).min)):
            x[pick == code] = value
    elif kind == "nothing":
        x = torch.where(x > 0, -INF, NAN)
    elif kind == "few":
        x[:, 3:] = torch.where(x[:, 3:] > 1.5, x[:, 3:], -INF)
    elif kind == "denormal":
        x = (x * 8).round() * 1e-45
    elif kind == "clustered":
        x[:, width // 2 : width // 2 + width // 8] += 10
    elif kind == "tailed":  # one score is octaves above all others
        x[:, 7] = 12
    elif kind == "narrow":  # hundreds of scores share a digit
        x = 1 + x / 100
    elif kind == "huge":
        x = x * 1e38
    else:
        assert kind == "normal"
    return x


KINDS = "normal relu grid equal zeros ascending descending special nothing few denormal clustered tailed narrow huge".split()


def ranges(rows, width, seed=0):
    """Row limits with all that may come: empty, reversed, far outside."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(-3, width + 3, (rows,), generator=generator, dtype=torch.int32) // 3
    ends = torch.randint(0, width + 9, (rows,), generator=generator, dtype=torch.int32)
    odd = [(INT_MIN, INT_MAX), (0, 0), (INT_MAX, INT_MIN), (5, 5), (width - 1, INT_MAX), (-7, width // 2), (3, width)]
    for row, (start, end) in enumerate(odd[:rows]):
        starts[row], ends[row] = start, end
    return starts, ends


BOUND = Bound(40, 32, 4)
SINGLE_CTA, SINGLE_CTA_BF16 = SingleCta(256, 2), SingleCtaBf16(2048, 2, 512)
SAMPLED, STREAMING = Sampled(64, 2, 1, 2, chunk=64, span=64, bound=BOUND), Streaming(64, 2, 2, 64)
SHARED = replace(SAMPLED, ctas_per_row=4, slots=128)
APPENDED = Appended(256, 2, 1, 2, 2400, tile=1024, chunk=64, bound=Bound(80, 64, 8))
EXACT = GroupMaxima(2048, 2, 2, maxima=2048, tile=2048, chunk=512)  # holds 256 groups
ROOMY = replace(EXACT, slots=2560)  # and 64 more, in a tile of 4096
PLANS: dict[str, tuple[str, Plan, int]] = {  # a form of an algorithm: its kernel, its plan, columns
    "thresholds.single_cta": ("thresholds.single_cta", replace(SINGLE_CTA, search=THRESHOLDS), 250),
    "thresholds.sampled": ("thresholds.sampled", replace(SAMPLED, search=THRESHOLDS), 150),
    "thresholds.sampled shared": ("thresholds.sampled", replace(SHARED, search=THRESHOLDS), 260),
    "thresholds.streaming": ("thresholds.streaming", replace(STREAMING, search=THRESHOLDS), 110),
    "single_cta": ("single_cta", SINGLE_CTA, 250),
    "single_cta windowed": ("single_cta", SingleCta(512, 2, window_shift=dispatch.WINDOW_SHIFT), 500),
    "single_cta coalesced": ("single_cta", SingleCta(512, 2, coalesced=True), 500),
    "single_cta_bf16": ("single_cta_bf16", SINGLE_CTA_BF16, 2000),
    "single_cta_bf16 coalesced": ("single_cta_bf16", replace(SINGLE_CTA_BF16, coalesced=True), 1500),
    "single_cta_bf16 spread": ("single_cta_bf16", replace(SINGLE_CTA_BF16, spread=True), 2000),
    "multi_cta": ("multi_cta", MultiCta(256, 2, 4, 2, resident=128, candidates=16, chunk=256), 420),
    "sampled": ("sampled", SAMPLED, 150),
    "sampled shared": ("sampled", SHARED, 260),
    "sampled spans": ("sampled", replace(SAMPLED, span=128), 420),
    "appended": ("appended", APPENDED, 1400),
    "appended shared": ("appended", replace(APPENDED, ctas_per_row=4, tile=1024), 2400),
    "multi_pass": ("multi_pass", MultiPass(128, 2, 4, 2, 8, chunk=64, span=128, bound=Bound(60, 64, 4)), 420),
    "streaming": ("streaming", STREAMING, 110),
}


def chosen(kernel: str, plan: Plan) -> Choice[Plan]:
    """What a launcher takes in place of its own choice."""
    return Choice(find(dispatch.KERNELS, kernel), plan)


def planned(form: str, rows: int) -> Choice[Plan]:
    """One of PLANS for so many rows."""
    kernel, plan, _ = PLANS[form]
    return chosen(kernel, for_rows(plan, rows))


def for_rows(plan: Plan, rows: int) -> Plan:
    """Of algorithms whose CTAs share a row, all rows are in flight."""
    if isinstance(plan, (Appended, MultiCta, GroupMaxima)):
        return replace(plan, rows=rows)
    if isinstance(plan, Sampled) and plan.ctas_per_row > 1:
        return replace(plan, rows_in_flight=rows)
    return plan


def group_maxima(x: torch.Tensor) -> torch.Tensor:
    """The highest of every group, NaN where there are only those."""
    groups = torch.nn.functional.pad(x, (0, -x.shape[1] % GROUP), value=-math.inf).unflatten(1, (-1, GROUP))
    top = groups.masked_fill(groups.isnan(), -math.inf).amax(2)
    return top.masked_fill(groups.isnan().all(2), math.nan)
