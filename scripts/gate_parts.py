"""A gate in parts: which tests and suites a part runs, and how the results of parts become one result of one commit."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

SAME = ("commit", "dirty", "versions", "gpu")  # what the parts of one result agree in
KINDS = ("tests", "suites")
# About what takes long on an H100, in seconds; everything else takes about one. A result's `seconds` say what it was.
LONG = {
    "test_topk.py": 744, "test_quality.py": 388, "test_soak.py": 350, "test_index_logits_mxfp4.py": 322,
    "test_attention_two_caches.py": 303, "test_topk_slots.py": 274, "test_batch_invariant.py": 250,
    "test_attention_extreme_scores.py": 222, "test_generate.py": 214, "test_attention_prefill_bf16.py": 204,
    "test_compile.py": 194, "test_autocast.py": 188, "test_attention_widths.py": 175, "test_experts.py": 150,
    "test_cli.py": 135, "test_draws.py": 116, "test_attention_into.py": 100, "test_repeatable.py": 97,
    "test_index_logits_hopper.py": 90, "test_speculative_batching.py": 90, "test_mtp.py": 90,
    "test_hf_static.py": 80, "test_topk_grouped.py": 77, "test_attention_swap_ab.py": 76, "test_graph.py": 69,
    "test_index_query.py": 61, "test_attention_growing_scores.py": 60, "test_hf_bridge.py": 60,
    "test_rank_steps.py": 60, "test_sampling_filters.py": 58, "test_attention_decode_fp8_latents.py": 58,
    "test_index_topk.py": 51, "test_properties.py": 48, "test_attention.py": 48, "test_compressor.py": 48,
    "test_index_logits.py": 45, "test_attention_split_kv.py": 40, "test_compat.py": 30,
    "hf_bridge": 90, "rank_step": 80, "decode_loop": 69, "step_share": 60, "speculation": 60, "load": 55,
    "real_share": 36, "loop_invariant": 30, "layer_v4_mxfp4": 28, "decode_few_heads": 23, "layer_v32": 22,
    "arrivals": 20, "decode_growth": 20, "select_few": 20, "topk_decode": 20, "compat": 15, "sustained": 15,
    "topk_prefill": 15, "rank_parts": 14, "prefill_scores_mxfp4": 13, "prefill_forms": 12, "prefill_few_heads": 10,
    "linears_few": 10,
    "prefill_v4": 10, "paged_scores_mxfp4": 10, "hf_layer": 9, "decode_v4": 9, "prefill_portable": 9,
    "rank_share": 8, "experts_few": 6, "paged_scores": 6, "prefill_scores": 6, "layer_v4": 5, "prefill_v32": 5,
    "experts_w4a8": 5, "prefill_prompt": 4, "prefill_ragged": 4, "decode_bf16": 4, "plan_cache": 3, "decode_v32": 3,
    "experts_many": 3,
}  # fmt: skip


class Part(NamedTuple):
    """Part ``number`` of ``of``, from 1 on."""

    kind: str
    number: int
    of: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.number}/{self.of}"

    def take(self, names: Iterable[str]) -> list[str]:
        """This part's share of the names: no other part's, and all parts together take all. The longest go first, each
        to the part that has the least to do."""
        shares: list[list[str]] = [[] for _ in range(self.of)]
        for name in sorted(names, key=lambda name: (-LONG.get(name, 1), name)):
            min(shares, key=lambda share: sum(LONG.get(name, 1) for name in share)).append(name)
        return sorted(shares[self.number - 1])


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
