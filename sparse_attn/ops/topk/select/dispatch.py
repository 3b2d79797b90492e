"""Which algorithm selects, and how it is launched.

A call takes the first kernel of ``KERNELS`` that supports it; one that is slower there is passed over. The number is
the kernel's place among them. On NVIDIA a search goes by radix digits, counted by PTX in a histogram in shared memory.
Elsewhere, and in the interpreter, it goes by thresholds.

 # | kernel                | on     | columns                            | rows                       | k
---|-----------------------|--------|------------------------------------|----------------------------|---------------
a row fits one CTA
 2 | group_maxima          | sm_90  | to 262144, faster from 32769       | any                        | to 4096
 3 | single_cta_bf16       | sm_90  | 4097 to 32768                      | any                        | any
 4 | single_cta            | NVIDIA | to 32768                           | any                        | any
10 | thresholds.single_cta | any    | to 8192                            | any                        | any
CTAs share a row
 1 | hopper.cluster        | sm_90  | 4097 to 131072, faster from 8193   | to 8                       | to the columns
 5 | multi_cta             | NVIDIA | 32769 to 262144                    | whose CTAs fit at once     | to 4096
 6 | multi_pass            | NVIDIA | any                                | faster above 2 an SM       | to 6553
 7 | appended              | sm_90  | 32769 to 262144, faster from 65536 | to 1 an SM, faster from 32 | to 4096
 8 | sampled               | NVIDIA | any                                | any                        | to 6553
11 | thresholds.sampled    | any    | any                                | any                        | to 6553
rows are streamed
 9 | streaming             | NVIDIA | any                                | any                        | any
12 | thresholds.streaming  | any    | any                                | any                        | any

group_maxima takes scores that come with group maxima, as index_topk_decode computes them. A regime begins with the
constants that its kernels share; a kernel's own stand in front of its functions.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import torch

from sparse_attn.framework import dispatch
from sparse_attn.framework.dispatch import YES, Choice, Kernel, Support, no, not_on, slower
from sparse_attn.framework.target import Target
from sparse_attn.ops.topk.select.fake import GROUP
from sparse_attn.ops.topk.select.plan import (
    THRESHOLDS,
    WINDOW_SHIFT,
    Appended,
    Bound,
    Cluster,
    GroupMaxima,
    MultiCta,
    MultiPass,
    Plan,
    Problem,
    Sampled,
    SingleCta,
    SingleCtaBf16,
    Streaming,
    group_maxima_of,
    power_of_two,
)


def problem_of(logits: torch.Tensor, row_starts: torch.Tensor | None, row_ends: torch.Tensor | None, k: int) -> Problem:
    """The problem of top_k_per_row's arguments, real or on meta."""
    rows, width = logits.shape
    return Problem(rows, width, k)


# --- where a kernel runs


def _radix(target: Target) -> Support:
    """Whether CTAs count in shared memory. The interpreter can, but need not."""
    return _made_for(target, target.vendor == "nvidia", "NVIDIA")


def _hopper(target: Target) -> Support:
    return _made_for(target, target.is_hopper, "sm_90")


def _made_for(target: Target, fits: bool, allowed: str) -> Support:
    if fits:
        return YES
    if target.interpreted:
        return slower("target: got the interpreter, faster by thresholds")._replace(of_target=True)
    return not_on(target, allowed)


def _at_most(name: str, value: int, most: int) -> Support:
    return YES if value <= most else no(f"{name}: got {value}, allowed: at most {most}")


def _fitting_registers(registers: int, target: Target) -> int | None:
    """Registers of a thread, where more CTAs at once were measured to be worth more than the spills cost."""
    return registers if target.is_hopper else None


# --- a row fits one CTA

RESIDENT = 32768  # columns of the widest row in one CTA's registers
SHORT = 8192  # where the search goes by thresholds

# group_maxima
TIE_SLOTS = 1024  # beside those of k groups


def _supports_group_maxima(problem: Problem, target: Target) -> Support:
    machine = _hopper(target)
    if not machine.able:
        return machine
    if not problem.group_maxima:
        return no("group maxima: got none, allowed: of every 8 scores, as index_topk_decode computes them")
    if problem.width > GROUP * RESIDENT:
        return _at_most("width", problem.width, GROUP * RESIDENT)
    if problem.k > RESIDENT // GROUP:
        return _at_most("k", problem.k, RESIDENT // GROUP)
    if problem.width <= RESIDENT:
        return slower(f"width: got {problem.width}, faster from {RESIDENT + 1}")
    return machine


def _plan_group_maxima(problem: Problem, target: Target) -> GroupMaxima:
    maxima, chosen = -(-problem.width // GROUP), GROUP * problem.k
    warps = 8 if max(maxima, chosen) <= 8192 else 16
    slots = min(-(-(chosen + TIE_SLOTS) // 4096) * 4096, RESIDENT)
    return GroupMaxima(
        max(slots, 1024 * warps),
        warps,
        problem.rows,
        group_maxima_of(problem.width),
        tile=max(power_of_two(maxima), 1024 * warps),
        chunk=4096,
        max_registers=128,
    )


def _supports_single_cta_bf16(problem: Problem, target: Target) -> Support:
    machine = _hopper(target)
    if not machine.able:
        return machine
    if not 4096 < problem.width <= RESIDENT:
        return no(f"width: got {problem.width}, allowed: 4097 to {RESIDENT}")
    if problem.width <= 8192 and problem.rows <= target.num_sms and 8 * problem.k > 8192:
        few = f"at most {target.num_sms} rows of at most 8192 columns"
        return slower(f"k: got {problem.k}, faster up to 1024 ({few})")
    return machine


def _plan_single_cta_bf16(problem: Problem, target: Target) -> SingleCtaBf16:
    """Few rows: one CTA an SM. Many rows: as many CTAs as hold their rows in registers, of 16 to 32 warps; rows of 8192
    columns take small CTAs where those come in three waves or more."""
    slots = power_of_two(problem.width)
    if problem.rows <= target.num_sms:
        if slots < RESIDENT:
            return SingleCtaBf16(slots, 8, 4096, spread=True, max_registers=136)
        return SingleCtaBf16(slots, 16, 8192, spread=True, max_registers=128)
    if slots > 8192:
        return SingleCtaBf16(slots, slots // 4096, 4096, coalesced=slots < RESIDENT, max_registers=128)
    waves = problem.rows // (8 * target.num_sms)
    return SingleCtaBf16(slots, 4 if waves >= 3 else 8, 2048, coalesced=True, max_registers=64)


# single_cta
MOST_EVEN = 3  # CTAs an SM up to which they claim registers, so that they spread evenly
LEAST_EVEN = 2048  # slots below which they claim registers only where each CTA has an SM of its own
WARPS_EVEN = 8  # of these
REGISTERS = 65536  # of an SM


def _supports_single_cta(problem: Problem, target: Target) -> Support:
    machine = _radix(target)
    return _at_most("width", problem.width, RESIDENT) if machine.able and problem.width > RESIDENT else machine


def _plan_single_cta(problem: Problem, target: Target) -> SingleCta:
    slots = max(256, power_of_two(problem.width))
    if slots > 8192:
        return SingleCta(slots, 16, window_shift=WINDOW_SHIFT, spread=True)
    few = problem.rows <= target.num_sms
    if slots == 8192:  # four CTAs on an SM, where there are as many
        return SingleCta(slots, 8, coalesced=not few, spread=few)
    plan = SingleCta(slots, max(2, slots // 512))
    return _evenly(plan, problem.rows, target) if few or slots >= LEAST_EVEN else plan


def _evenly(plan: SingleCta, rows: int, target: Target) -> SingleCta:
    """Few rows: ``plan`` with so many registers a thread that no SM holds more CTAs than it must. Otherwise CTAs crowd
    on the SMs that the launch before leaves first. Many rows: ``plan`` with fewer instructions."""
    each = -(-rows // target.num_sms)
    if each > MOST_EVEN:
        return replace(plan, coalesced=True)
    if not target.is_hopper:
        return plan
    registers = 8 * (REGISTERS // (32 * WARPS_EVEN * (each + 1)) // 8 + 1)
    return replace(plan, num_warps=WARPS_EVEN, max_registers=registers, spread=True)


def _supports_threshold_single_cta(problem: Problem, target: Target) -> Support:
    return _at_most("width", problem.width, SHORT)


def _plan_threshold_single_cta(problem: Problem, target: Target) -> SingleCta:
    slots = max(256, power_of_two(problem.width))
    return SingleCta(slots, max(2, slots // 1024), THRESHOLDS)


# --- CTAs share a row

MOST_CTAS = 64  # that share a row
CTA_COLUMNS = 8192  # below which no CTA's share of a row should fall
CANDIDATES = 8192  # most that are searched of a row
LARGEST_K = 4 * CANDIDATES // 5  # of which a sample bounds the candidates
SAMPLES = 4096  # of a row of at most WIDE_ROW columns, twice as many of a wider one
WIDE_ROW = 1 << 18
BITMASK_COLUMNS = 262144  # whose bits lie behind a histogram

# hopper.cluster
CLUSTER = 8  # CTAs of a cluster, which have room in any GPC
CLUSTER_ROWS = 8  # at most, so that all clusters certainly run at once
CLUSTER_SLOTS = 1024, 16384  # columns of each CTA of it, at least and at most
CLUSTER_FROM = 8193  # columns; fewer take a CTA of its own less time
CLUSTER_SHIFT = 14  # bits behind a digit of which 2048 span four octaves


def _supports_cluster(problem: Problem, target: Target) -> Support:
    if not target.is_hopper:
        return not_on(target, "sm_90")  # the interpreter runs no Gluon
    least, most = (CLUSTER * slots for slots in CLUSTER_SLOTS)
    if not least // 2 < problem.width <= most:
        return no(f"width: got {problem.width}, allowed: {least // 2 + 1} to {most}")
    for name, value, allowed in (("rows", problem.rows, CLUSTER_ROWS), ("k", problem.k, problem.width)):
        if value > allowed:
            return _at_most(name, value, allowed)
    if problem.width < CLUSTER_FROM:
        return slower(f"width: got {problem.width}, faster from {CLUSTER_FROM}")
    return YES


def _plan_cluster(problem: Problem, target: Target) -> Cluster:
    slots = max(power_of_two(-(-problem.width // CLUSTER)), CLUSTER_SLOTS[0])
    return Cluster(slots, 8 if slots <= 4096 else 16, CLUSTER, CLUSTER_SHIFT)


# multi_cta
LEAST_CTAS = 4  # to hold a row together
CTA_RESIDENT = 16384  # columns that each of them holds at most


def _supports_multi_cta(problem: Problem, target: Target) -> Support:
    machine = _orders_by_bits(problem, _radix(target))
    if not machine.able:
        return machine
    needed = max(LEAST_CTAS, power_of_two(-(-problem.width // CTA_RESIDENT)))
    if problem.rows * needed > target.num_sms:
        most = target.num_sms // needed
        share = f"{problem.width} columns take {needed} CTAs a row"
        return no(f"rows: got {problem.rows}, allowed: at most {most} ({share})")
    return machine


def _plan_multi_cta(problem: Problem, target: Target) -> MultiCta:
    slots, ctas = _slots(problem, CANDIDATES), _ctas_per_row(problem, target)
    return MultiCta(
        slots,
        16,
        ctas,
        problem.rows,
        resident=_share(problem, ctas),
        candidates=slots // ctas * 3 // 4,
        chunk=4096,
        reserved_ctas=_reserved_ctas(problem, slots, target),
    )


# multi_pass
MULTI_PASS = 2  # rows an SM beyond which each pass over long ones is a launch
BOUNDED_ROWS = 8192  # rows whose bounds are found at a time
CANDIDATE_BYTES = 65 << 20  # for the candidates of 1024 of them, or more
PART, MOST_PARTS = 8192, 16  # columns of which a CTA collects the candidates, at least; parts of a row, at most


def _supports_multi_pass(problem: Problem, target: Target) -> Support:
    sampled = _supports_sampled(problem, target)
    if sampled.able and problem.rows <= MULTI_PASS * target.num_sms:
        return slower(f"rows: got {problem.rows}, faster from {MULTI_PASS * target.num_sms + 1}")
    return sampled


def _plan_multi_pass(problem: Problem, target: Target) -> MultiPass:
    rows, width = problem.rows, problem.width
    slots, parts = _slots(problem, CANDIDATES), min(power_of_two(-(-width // PART)), MOST_PARTS)
    bounded = min(rows, BOUNDED_ROWS)
    nbytes = CANDIDATE_BYTES if problem.scratch_bytes is None else _whole_ctas(problem.scratch_bytes, slots)
    fitting = (nbytes - 8 * bounded) // (8 * slots + 8 * parts) // 16 * 16
    return MultiPass(
        slots,
        8,
        parts,
        min(bounded, fitting),
        bounded,
        chunk=2048,
        span=max(power_of_two(-(-width // parts)), PART),
        bound=Bound(_between(problem.k, slots), SAMPLES if width <= WIDE_ROW else 2 * SAMPLES, 4),
        max_registers=_fitting_registers(64 if slots < CANDIDATES else 80, target),
        collect_registers=_fitting_registers(32, target),
    )


# appended
APPENDED_ROWS, APPENDED_COLUMNS = 32, 65536  # from which appending was measured to be faster
SAMPLES_ABOVE = 128  # a bound that is to land between k and four times as many, of samples that come by eights


def _supports_appended(problem: Problem, target: Target) -> Support:
    machine = _orders_by_bits(problem, _hopper(target))
    if not machine.able:
        return machine
    if problem.rows > target.num_sms:
        return _at_most("rows", problem.rows, target.num_sms)
    for name, got, least in (("width", problem.width, APPENDED_COLUMNS), ("rows", problem.rows, APPENDED_ROWS)):
        if got < least:
            return slower(f"{name}: got {got}, faster from {least}")
    return machine


def _plan_appended(problem: Problem, target: Target) -> Appended:
    slots = _slots(problem, CANDIDATES)
    candidates = _between(problem.k, slots)
    few = 4 * problem.k <= slots and SAMPLES * candidates >= SAMPLES_ABOVE * problem.width  # are enough
    return Appended(
        slots,
        16,
        _ctas_per_row(problem, target),
        problem.rows,
        problem.width,
        tile=8192,
        chunk=4096,
        bound=Bound(candidates, SAMPLES if few else 2 * SAMPLES, 8),
        reserved_ctas=_reserved_ctas(problem, slots, target),
    )


# sampled
SPAN = 65536  # columns whose bits fill the histogram


def _supports_sampled(problem: Problem, target: Target) -> Support:
    machine = _radix(target)
    return _at_most("k", problem.k, LARGEST_K) if machine.able and problem.k > LARGEST_K else machine


def _plan_sampled(problem: Problem, target: Target) -> Sampled:
    slots, ctas = _slots(problem, CANDIDATES), _ctas_per_row(problem, target)
    share = _share(problem, ctas)
    alone = problem.rows * ctas <= target.num_sms  # on an SM
    return Sampled(
        slots,
        16,
        ctas,
        problem.rows if alone else min(problem.rows, 2 * target.num_sms),
        chunk=min(share, 16384 if alone else 8192),
        span=min(share, SPAN),
        bound=_bound(problem, slots),
        reserved_ctas=_reserved_ctas(problem, slots, target),
        max_registers=None if alone else _fitting_registers(64, target),
    )


# thresholds.sampled
NARROW, WIDE = 2048, 8192  # columns of a chunk


def _supports_threshold_sampled(problem: Problem, target: Target) -> Support:
    return _at_most("k", problem.k, LARGEST_K)


def _plan_threshold_sampled(problem: Problem, target: Target) -> Sampled:
    rows, width, resident = problem.rows, problem.width, 2 * target.num_sms
    slots = _slots(problem, SHORT)
    share = power_of_two(resident // max(rows, 1) + 1) // 2
    most = MOST_CTAS if rows == 1 else MOST_CTAS // 4
    ctas = max(1, min(share, most, power_of_two(-(-width // NARROW))))
    chunk = min(max(power_of_two(-(-width // ctas)), NARROW), WIDE)
    return Sampled(
        slots,
        8,
        ctas,
        rows if ctas > 1 else min(rows, resident),
        chunk=chunk,
        span=chunk,
        bound=_bound(problem, slots),
        reserved_ctas=min(rows * MOST_CTAS, resident),
        search=THRESHOLDS,
    )


def _orders_by_bits(problem: Problem, machine: Support) -> Support:
    """Of kernels on ``machine`` that hold candidates in any order, and a bit for each column of a row."""
    if not machine.able:
        return machine
    if not RESIDENT < problem.width <= BITMASK_COLUMNS:
        return no(f"width: got {problem.width}, allowed: {RESIDENT + 1} to {BITMASK_COLUMNS}")
    return _at_most("k", problem.k, CANDIDATES // 2) if problem.k > CANDIDATES // 2 else machine


def _slots(problem: Problem, most: int) -> int:
    """Half of ``most``, where the sample gives a bound that is sharp enough to land between k and that."""
    sharp = 8 * problem.k <= most or (4 * problem.k <= most and problem.width <= 1 << 16)
    return most // 2 if sharp else most


def _ctas_per_row(problem: Problem, target: Target) -> int:
    share = power_of_two(target.num_sms // max(problem.rows, 1) + 1) // 2
    return max(1, min(share, MOST_CTAS, power_of_two(-(-problem.width // CTA_COLUMNS))))


def _share(problem: Problem, ctas: int) -> int:
    """Columns for each of the CTAs that share a row."""
    return max(power_of_two(-(-problem.width // ctas)), CTA_COLUMNS)


def _reserved_ctas(problem: Problem, slots: int, target: Target) -> int:
    """How many CTAs to reserve scratch for. No call with fewer rows or columns needs more."""
    reserved = min(problem.rows * MOST_CTAS, 2 * target.num_sms)
    if problem.scratch_bytes is None or problem.rows == 1:
        return reserved
    return max(reserved, _whole_ctas(problem.scratch_bytes, slots) // (4 * (slots + 1)))


def _whole_ctas(nbytes: int, slots: int) -> int:
    """``nbytes``, cut to whole CTAs' candidates. The widest rows need the most."""
    for most in (CANDIDATES, slots):
        nbytes -= nbytes % (4 * (most + 1))
    return nbytes


def _bound(problem: Problem, slots: int) -> Bound:
    return Bound(_between(problem.k, slots), SAMPLES, 4 if problem.width <= WIDE_ROW else 1)


def _between(low: int, high: int) -> int:
    """The geometric mean. A bound on the number of candidates may then err by the same factor on either side."""
    return max(64, int((low * high) ** 0.5))


# --- rows are streamed


def _supports_streaming(problem: Problem, target: Target) -> Support:
    return _radix(target)


def _plan_streaming(problem: Problem, target: Target) -> Streaming:
    registers = _fitting_registers(64, target)  # two CTAs of 16 warps on an SM
    return Streaming(CANDIDATES, 16, min(problem.rows, 2 * target.num_sms), 4096, max_registers=registers)


def _always(problem: Problem, target: Target) -> Support:
    return YES


def _plan_threshold_streaming(problem: Problem, target: Target) -> Streaming:
    return Streaming(SHORT, 16, min(problem.rows, 2 * target.num_sms), 4096, THRESHOLDS)


# --- the table


def _launch():
    from sparse_attn.ops.topk.select.algorithms import launch

    return launch


KERNELS: tuple[Kernel[Problem, Plan], ...] = (
    Kernel("hopper.cluster", _supports_cluster, _plan_cluster, lambda: _launch().cluster),
    Kernel("group_maxima", _supports_group_maxima, _plan_group_maxima, lambda: _launch().group_maxima),
    Kernel("single_cta_bf16", _supports_single_cta_bf16, _plan_single_cta_bf16, lambda: _launch().single_cta),
    Kernel("single_cta", _supports_single_cta, _plan_single_cta, lambda: _launch().single_cta),
    Kernel("multi_cta", _supports_multi_cta, _plan_multi_cta, lambda: _launch().multi_cta),
    Kernel("multi_pass", _supports_multi_pass, _plan_multi_pass, lambda: _launch().multi_pass),
    Kernel("appended", _supports_appended, _plan_appended, lambda: _launch().appended),
    Kernel("sampled", _supports_sampled, _plan_sampled, lambda: _launch().sampled),
    Kernel("streaming", _supports_streaming, _plan_streaming, lambda: _launch().streaming),
    Kernel(
        "thresholds.single_cta",
        _supports_threshold_single_cta,
        _plan_threshold_single_cta,
        lambda: _launch().single_cta,
    ),
    Kernel("thresholds.sampled", _supports_threshold_sampled, _plan_threshold_sampled, lambda: _launch().sampled),
    Kernel("thresholds.streaming", _always, _plan_threshold_streaming, lambda: _launch().streaming),
)


@functools.lru_cache(maxsize=1024)  # a pure function that every eager call asks
def choose(problem: Problem, target: Target, kernel: str | Choice[Plan] | None = None) -> Choice[Plan]:
    """The kernel that selects, and its plan. kernel: see sparse_attn.framework.dispatch.choose."""
    return dispatch.choose(KERNELS, problem, target, kernel)


def last_change(problem: Problem, target: Target) -> int:
    """Of ``problem``'s rows, the number beyond which one more row never needs less scratch."""
    passes = isinstance(choose(problem, target).plan, MultiPass)
    return min(problem.rows, BOUNDED_ROWS if passes else MULTI_PASS * target.num_sms)


def widths_of_most_scratch(width: int) -> tuple[int, ...]:
    """Widths up to ``width``, one of which needs the most scratch. Beyond the widest row with group maxima, less is
    needed."""
    return (width, GROUP * RESIDENT) if width > GROUP * RESIDENT else (width,)
