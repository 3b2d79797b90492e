"""A gate in parts: which tests and suites a part runs, and how the results of parts become one result of one commit."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

SAME = ("commit", "dirty", "versions", "gpu")  # what the parts of one result agree in
KINDS = ("tests", "suites")
# About what takes long on an H200, in seconds; everything else takes about one. A result's `seconds` say what it was.
LONG = {
    "test_topk.py": 994, "test_quality.py": 643, "test_attention_two_caches.py": 454, "test_generate.py": 362,
    "test_attention_into.py": 335, "test_attention_extreme_scores.py": 329, "test_autocast.py": 277,
    "test_attention_prefill_bf16.py": 260, "test_soak.py": 257, "test_batch_invariant.py": 255, "test_compile.py": 234,
    "test_index_logits_mxfp4.py": 229, "test_attention_widths.py": 211, "test_cli.py": 190, "test_experts.py": 187,
    "test_index_logits_hopper.py": 145, "test_draws.py": 141, "test_index_logits_decoded.py": 140, "test_mtp.py": 128,
    "test_topk_slots.py": 122, "test_attention_decode_fp8_latents.py": 120, "test_attention_swap_ab.py": 111,
    "test_repeatable.py": 108, "test_speculative_batching.py": 108, "test_prefill_activations.py": 97,
    "test_grouped_linear_hopper.py": 97, "test_index_query.py": 87, "test_attention_growing_scores.py": 85,
    "test_attention.py": 74, "test_properties.py": 74, "test_attention_decode_fp8.py": 71, "test_compressor.py": 70,
    "test_index_logits.py": 69, "test_rank_topk.py": 64, "test_graph.py": 64, "test_index_topk.py": 63,
    "test_hf_static.py": 56, "test_hf_bridge.py": 56, "test_sampling_filters.py": 47, "test_real_dims_v4.py": 46,
    "test_attention_split_kv.py": 46, "test_grouped_linear_fp8.py": 41, "test_grouped_linear.py": 40,
    "test_kernel_count.py": 38, "test_rope.py": 26, "test_gradients.py": 25, "test_ragged.py": 25,
    "test_real_dims.py": 25, "test_rows.py": 23, "test_debug.py": 22, "test_workspace_threads.py": 21,
    "test_dispatch.py": 20,
    "load": 210, "hf_bridge": 142, "decode_loop": 82, "rank_step": 80, "arrivals": 57, "speculation": 41,
    "real_share": 39, "step_share": 36, "hf_layer": 30, "layer_v4_mxfp4": 28, "compat": 22, "layer_v32": 20,
    "layer_v4": 19, "rank_share": 19, "topk_decode": 18, "rank_parts": 18, "sustained": 17, "experts_w4a8": 17,
    "paged_scores_mxfp4": 16, "plan_cache": 15, "decode_growth": 15, "prefill_scores_mxfp4": 14, "prefill_v4": 13,
    "paged_scores": 13, "select_decode": 12, "prefill_forms": 12, "prefill_chain": 12, "linears_exact": 12,
    "loop_invariant": 11, "prefill_portable": 11, "decode_few_heads": 10, "prefill_few_heads": 10, "topk_prefill": 10,
    "decode_v32": 9, "prefill_prompt": 9, "decode_v4": 9, "select_few": 8, "prefill_v32": 8, "experts_fp8": 8,
    "decode_invariant": 7, "prefill_scores": 7, "experts_many": 6, "experts_few": 6, "decode_bf16": 6,
    "prefill_ragged": 5, "linears_many": 5, "linears_few": 3, "select_prefill": 1,
}  # fmt: skip


class Part(NamedTuple):
    """Part ``number`` of ``of``, from 1 on."""

    kind: str
    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.number}/{self.of}"

    def take(self, names: Iterable[str]) -> list[str]:
        """This part's share of the names, the longest first: no other part's, and all parts together take all. Each
        goes to the part that has the least to do."""
        shares: list[list[str]] = [[] for _ in range(self.of)]
        for name in sorted(names, key=lambda name: (-LONG.get(name, 1), name)):
            min(shares, key=lambda share: sum(LONG.get(name, 1) for name in share)).append(name)
        return shares[self.number - 1]


def part(text: str) -> Part:
    found = re.fullmatch(rf"({'|'.join(KINDS)}):(\d+)/(\d+)", text)
    if found is None or not 1 <= int(found[2]) <= int(found[3]):
        raise ValueError(f"part: got {text!r}, allowed: tests:I/N or suites:I/N, I from 1 to N")
    return Part(found[1], int(found[2]), int(found[3]))


def result_of(about: dict, parts: dict[str, dict]) -> dict:
    """The result of these parts. unfinished: those that are missing. good: none is, each was good, and no file differed
    from the commit. deselected: tests that need more GPUs than there were."""
    names = [part(text) for text in parts]
    unfinished = []
    for kind in KINDS:
        counts = {one.of for one in names if one.kind == kind}
        if len(counts) > 1:
            got = " and of ".join(map(str, sorted(counts)))
            raise ValueError(f"{kind}: got parts of {got}, allowed: of one number")
        of = counts.pop() if counts else 1
        unfinished += [str(one) for one in (Part(kind, number, of) for number in range(1, of + 1)) if one not in names]
    ordered = {str(one): parts[str(one)] for one in sorted(names, key=lambda one: (KINDS.index(one.kind), one.number))}
    counted = [one["tests"] for one in ordered.values() if "tests" in one]
    tests = {key: sum(counts[key] for counts in counted) for key in ("passed", "failed", "skipped")}
    deselected = {name: why for one in ordered.values() for name, why in one.get("deselected", {}).items()}
    return {
        **{key: about[key] for key in SAME},
        "good": not unfinished and not about["dirty"] and all(map(good, ordered.values())),
        "unfinished": unfinished,
        "tests": tests,
        "deselected": deselected,
        "parts": ordered,
    }


def good(one: dict) -> bool:
    """Whether a part ran something and nothing in it failed or was skipped."""
    if (tests := one.get("tests")) is None:
        return one["code"] == 0 and bool(one.get("records"))
    return one["code"] == 0 and tests["passed"] > 0 and tests["failed"] == tests["skipped"] == 0


def room_for(wanted: list[Part], about: dict, before: dict | None) -> None:
    """ValueError where the result ``before`` cannot take these parts: said before anything runs."""
    planned = {str(one): {"code": 1} for one in wanted}
    if before is not None:
        if there := before.get("parts", {}).keys() & planned.keys():
            raise ValueError(f"{', '.join(sorted(there))}: in the result already")
        merge([before, result_of(about, planned)])
    result_of(about, planned)


def merge(results: Iterable[dict]) -> dict:
    """One result of all parts. ValueError where they are not of one commit, GPU and set of versions, or two differ
    about a part."""
    about, parts = None, {}
    for result in results:
        if "parts" not in result:
            raise ValueError(f"result of {result.get('commit')}: it has no parts")
        about = about or result
        for key in SAME:
            if result[key] != about[key]:
                raise ValueError(f"{key}: got {about[key]!r} and {result[key]!r}, allowed: parts of one")
        for name, one in result["parts"].items():
            if parts.setdefault(name, one) != one:
                raise ValueError(f"{name}: got two different results, allowed: one")
    if about is None:
        raise ValueError("results: got none")
    return result_of(about, parts)


def records_of(result: dict | list) -> list[dict]:
    """The records of a gate's result, or of what bench.py --json wrote."""
    if isinstance(result, list):
        return result
    if "parts" not in result:
        return result["records"]
    return [record for one in result["parts"].values() for record in one.get("records", ())]
