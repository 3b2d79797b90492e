"""What a compiled kernel must keep to, and the spills that are allowed."""

from __future__ import annotations

import re

from aot_cases.waits import WAITS, arguments, reaches_memory_early
from sparse_attn.device.triton_private import VERSION
from sparse_attn.framework.target import Target
from sparse_attn.testing.aot import Compiled

MAX_THREADS = 1024  # of a program
UNASKED = 48 << 10  # bytes of shared memory; Triton asks for more where its own part alone is more
TENSOR_MEMORY = 512  # columns of sm_100
FP8_INSTRUCTIONS = {"nvidia": ("ptx", r"e4m3|e5m2"), "amd": ("amdgcn", r"v_\w*(?:fp8|bf8)\w*")}
TWICE_ROUNDED = re.compile(r"cvt\.\S*e4m3x2\.f16x2")
SHARED_ADDRESS = re.compile(r"(?:mov\.b32|add\.s32)\s+(%r\d+), (global_smem|%r\d+)(?:, (\d+))?;")
SHARED_ACCESS = re.compile(r"\[(global_smem|%r\d+)(?:\+(\d+))?\]")
BARRIER_BYTES = 8

# Bytes of a thread's stack, by kernel and target; "nvidia" stands for those that are not named. Others spill nothing.
ALLOWED_SPILLS = {
    # A row of 32768 in the registers of a multiprocessor; on sm_90 more programs there, which were measured to be worth
    # it: ops/topk/select/dispatch.py. Unaligned rows, whose loads are one score each, spill the most.
    "topk.select.algorithms.single_cta.select_single_cta": {"sm_90": 56, "nvidia": 600},
    "topk.select.algorithms.sampled.select_sampled": {"sm_90": 416, "nvidia": 384},
    "topk.select.algorithms.multi_cta.select_multi_cta": {"sm_90": 56, "nvidia": 64},
    "topk.select.algorithms.appended.select_appended": {"sm_90": 32},
    "topk.select.algorithms.multi_pass.select_candidates": {"sm_90": 64, "nvidia": 16},
    # An address, in one of two forms; which, ptxas and every line decide. Measured with it.
    "topk.select.algorithms.group_maxima.select_group_maxima": {"sm_90": 8},
    # A scalar or two of a row; of rows of 2048 on sm_120 some more.
    "ragged.lists.pack_rows": {"sm_120": 32, "nvidia": 8},
    # Addresses beside the tile of sums: at most 32 bytes of the usual forms, more of fp16 rows, and of bf16 and fp8
    # ones together. Forms that spill less were measured to take 1 to 40% more.
    "attention.sparse.portable.attend": {"sm_90": 176},
    # Scalars of a query block, beside its weights and a product in 112 registers.
    "indexer.scores.hopper.paged.paged_mqa_logits": {"sm_90": 24},
    "indexer.scores.hopper.prefill.mqa_logits": {"sm_90": 16},
    # The same, in the branch for groups that are far apart.
    "indexer.scores.hopper.paged_mxfp4.paged_mqa_logits": {"sm_90": 64},
    "indexer.scores.hopper.prefill_mxfp4.mqa_logits": {"sm_90": 376},
    # Four scalars, with triton 3.6 alone.
    "layers.hyper_connection.mix": {"sm_100": 16},
    # Tiles of 64 rows, two of sums.
    "layers.products.swap_ab.swap_ab": {"sm_90": 0, "nvidia": 16},
    "topk.ranks.portable.one_gather.merge_candidates": {"sm_90": 0, "nvidia": 16},  # of 16384 candidates
    "layers.products.swap_ab.sorted.gate_up": {"sm_90": 0, "nvidia": 24},
    "layers.products.swap_ab.sorted.down": {"sm_90": 0, "nvidia": 40},
    # Scalars of the producers.
    "attention.sparse.hopper.decode_fp8.attend": {"sm_90": 64},
    # Of plain rows whose largest scores are asked for.
    "attention.sparse.hopper.swap_ab.attend": {"sm_90": 8},
}

# Bytes with later Tritons than 3.6, which kernels were timed with.
SPILLS_OF_LATER = {
    (3, 8): {
        "layers.products.portable.fp8.multiply": {"sm_100": 8},
        "indexer.scores.hopper.prefill.mqa_logits": {"sm_90": 96},
        "indexer.scores.hopper.prefill_decoded.mqa_logits": {"sm_90": 80},
        "indexer.scores.portable.mxfp4.mqa_logits": {"sm_90": 0, "nvidia": 104},
        "ragged.lists.pack_rows": {"nvidia": 24},
        "topk.select.algorithms.multi_cta.select_multi_cta": {"sm_120": 128},
    },
    (3, 9): {
        "attention.sparse.hopper.prefill_bf16.attend": {"sm_90": 120},
        "attention.sparse.hopper.swap_ab.attend": {"sm_90": 32},
        "attention.sparse.portable.attend": {"sm_90": 528},
        "indexer.scores.hopper.prefill.mqa_logits": {"sm_90": 40},
        "indexer.scores.hopper.paged.paged_mqa_logits": {"sm_90": 56},
        "indexer.scores.portable.mqa_logits": {"sm_90": 3024},  # of fp32 queries
        "indexer.scores.portable.paged_mqa_logits": {"sm_90": 496},
        "topk.select.algorithms.single_cta.select_single_cta": {"sm_90": 144},
        "topk.select.algorithms.multi_pass.select_candidates": {"sm_90": 72},
        "topk.select.algorithms.multi_pass.collect_candidates": {"sm_90": 24},
        "topk.select.algorithms.group_maxima.select_group_maxima": {"sm_90": 16},
        "ragged.lists.pack_rows": {"nvidia": 32},
    },
}

# What a launch may read before it waits: what another waited for, before it let this one or any in between start. That
# one gave it ``state``. Or a weight, which no launch of this library writes. See device/pdl.py.
SCORES = {"logits", "row_starts", "row_ends"}
WEIGHTS = {
    "layers.products.hopper.stream_k.stream_k": {"words"},
    "layers.products.hopper.stream_k_wide.stream_k_wide": {"codes"},
}
READ_EARLY = tuple(f"topk.ranks.portable.digits.{name}" for name in ("count_digits", "count_ties", "take_winners"))
EARLY = WEIGHTS | dict.fromkeys(READ_EARLY, SCORES)


def allowed_spills(name: str, kernel: str, target: Target) -> int:
    """Bytes of a thread's stack that ``kernel`` may take on the target called ``name``, with this Triton."""
    tables = (ALLOWED_SPILLS.get(kernel, {}), SPILLS_OF_LATER.get(VERSION, {}).get(kernel, {}))
    return max(table.get(name, table.get(target.vendor, 0)) for table in tables)


def failures(name: str, kernel: str, target: Target, compiled: Compiled) -> list[str]:
    """What is wrong with ``kernel`` on the target called ``name``."""
    wrong = []
    if compiled.shared_memory > target.shared_memory:
        wrong.append(f"{compiled.shared_memory} bytes of shared memory, allowed: {target.shared_memory}")
    asked = compiled.shared_memory - compiled.claimed
    if asked <= UNASKED < compiled.shared_memory:
        wrong.append(
            f"{asked} bytes of shared memory beside {compiled.claimed} claimed: more than a launch grants unasked"
        )
    allowed = allowed_spills(name, kernel, target)
    if compiled.spill_bytes > allowed:
        wrong.append(f"{compiled.spill_bytes} bytes of spills, allowed: {allowed}")
    if compiled.threads > MAX_THREADS:
        wrong.append(f"{compiled.threads} threads, allowed: {MAX_THREADS}")
    if compiled.warp_size != target.warp_size:
        wrong.append(f"waves of {compiled.warp_size}, the target's have {target.warp_size}")
    if compiled.tensor_memory > TENSOR_MEMORY:
        wrong.append(f"{compiled.tensor_memory} columns of tensor memory, allowed: {TENSOR_MEMORY}")
    stage, pattern = FP8_INSTRUCTIONS[target.vendor]
    if not target.fp8_dot and (found := re.search(pattern, compiled.assembly[stage])):
        wrong.append(f"an fp8 instruction, {found[0]}, where there is no e4m3fn hardware")
    if found := TWICE_ROUNDED.search(compiled.assembly.get("ptx", "")):
        wrong.append(f"{found[0]}: fp32 that became fp16 on its way to fp8 was rounded twice")
    if target.has_pdl and (found := reaches_memory_early(compiled.assembly["ptx"], early_reads(kernel, compiled))):
        wrong.append(f"{found} before {WAITS}, which lets launches start early")
    wrong += [f"{access} in the memory of an mbarrier" for access in _in_barriers(compiled.assembly.get("ptx", ""))]
    return wrong


def early_reads(kernel: str, compiled: Compiled) -> list[int]:
    """The arguments whose memory ``kernel`` may read before it waits."""
    entry = "ttir" if "ttir" in compiled.assembly else "ttgir"  # of Gluon
    names = arguments(compiled.assembly[entry]) if kernel in EARLY else []
    return (
        [at for at, name in enumerate(names) if name in EARLY[kernel]] if "state" in names or kernel in WEIGHTS else []
    )


def _in_barriers(ptx: str) -> list[str]:
    """Instructions that reach memory in which an mbarrier began and that are not for one, as far as addresses are
    known: the compiler gives away the memory of mbarriers that nobody uses, and does not end them before."""
    known = {"global_smem": 0}
    barriers: set[int] = set()
    accesses: list[tuple[int, str]] = []
    for line in map(str.strip, ptx.splitlines()):
        if (made := SHARED_ADDRESS.match(line)) and made[2] in known:
            known[made[1]] = known[made[2]] + int(made[3] or 0)
        elif (reached := SHARED_ACCESS.search(line)) and reached[1] in known:
            address = known[reached[1]] + int(reached[2] or 0)
            if "mbarrier.init" in line:
                barriers.add(address)
            elif "mbarrier" not in line:
                accesses.append((address, line))
    return [line for address, line in accesses if any(0 <= address - first < BARRIER_BYTES for first in barriers)]
