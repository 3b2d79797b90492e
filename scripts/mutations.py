"""Bugs that the tests must catch: each a snippet that occurs once in its file, and what stands there instead."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent


class Mutation(NamedTuple):
    """what: the bug in words. tests: pytest node ids, one of which must fail. interpreted: kernels, run by Triton's
    interpreter. gpu: kernels that only the GPU they are written for runs."""

    name: str
    what: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    interpreted: bool = False
    gpu: bool = False

    def applied(self, source: str) -> str:
        """``source`` with the bug in it; ValueError unless ``old`` occurs exactly once."""
        if (count := source.count(self.old)) != 1:
            raise ValueError(f"mutation {self.name}: {self.old!r} occurs {count} times in {self.file}, allowed: once")
        return source.replace(self.old, self.new)


OPS = "sparse_attn/ops/"

# fmt: off
KERNELS = [
    Mutation(
        "index-scales-behind-padded-keys", "index scales are read from behind keys of a power-of-two width",
        OPS + "index_cache/kernels.py",
        "scale_at = (base + block_size.to(tl.int64) * D).to(tl.pointer_type(tl.float32)) + within\n        tl.store(scales",
        "scale_at = (base + block_size.to(tl.int64) * PAD_D).to(tl.pointer_type(tl.float32)) + within\n"
        "        tl.store(scales",
        ("tests/test_index_cache.py::test_gather_kernel_equals_reference",),
    ),
    Mutation(
        "half-swapped-frequencies", "halves are rotated by the frequencies of neighbouring pairs",
        "sparse_attn/device/rope.py",
        "frequency = tl.where(is_first, place, place - WIDTH // 2)",
        "frequency = place // 2",
        ("tests/test_index_query.py::test_kernel_shapes",),
    ),
    Mutation(
        "scores-of-padded-heads", "an infinite key times the zeros of a padded head makes its score NaN",
        OPS + "index_logits/portable/kernels.py",
        "    if not WHOLE_H:\n        weighed = tl.where(real[None, :], weighed, 0.0)",
        "    if False:\n        weighed = tl.where(real[None, :], weighed, 0.0)",
        ("tests/test_index_logits.py::test_an_infinite_key_has_a_score_beside_padded_heads",),
    ),
    Mutation(
        "topk-end-inclusive", "the score at a row's end can be selected",
        OPS + "topk/primitives/tile.py",
        "inside = (columns - start).to(tl.uint32, bitcast=True) < (end - start).to(tl.uint32)",
        "inside = (columns - start).to(tl.uint32, bitcast=True) <= (end - start).to(tl.uint32)",
        ("tests/test_topk.py::test_kernel_ranges_and_strides[thresholds.single_cta]",),
    ),
    Mutation(
        "topk-words-rounded-down", "the last word of a CTA's candidates is the next one's first",
        OPS + "topk/algorithms/sampled.py",
        'tl.atomic_add(taken, tl.cdiv(total, WORD), sem="relaxed")',
        'tl.atomic_add(taken, total // WORD, sem="relaxed")',
        ("tests/test_topk.py::test_kernel[multi_pass-normal]",),
    ),
    Mutation(
        "topk-too-few-candidates", "a bound that fewer than k scores of a row exceed is believed",
        OPS + "topk/algorithms/multi_pass.py",
        'fits = (taken <= SLOTS) & ((tl.sum(number, 0) >= k) | (tl.load(bounds + row) == float("-inf")))',
        "fits = taken <= SLOTS",
        ("tests/test_topk.py::test_kernel_wrong_bound[normal]",),
    ),
    Mutation(
        "topk-staged-once", "columns beyond what is staged at once are staged where the first were",
        OPS + "topk/primitives/compact.py",
        "set_bits.stage(smem, bitmask, position - first, word_base, here)",
        "set_bits.stage(smem, bitmask, position, word_base, here)",
        ("tests/test_topk.py::test_kernel_more_columns_than_are_staged_at_once",),
    ),
    Mutation(
        "topk-bf16-any-tie", "of equal scores that share the k-th's bf16, any are selected",
        OPS + "topk/primitives/bf16_select.py",
        "keys = tl.where(valid, (distance << 15) | slot, -1)",
        "keys = tl.where(valid, (distance << 15) | (slot ^ 0x7FFF), -1)",
        ("tests/test_topk.py::test_kernel[single_cta_bf16-grid]",
         "tests/test_topk.py::test_kernel_scores_that_share_a_bf16[3-single_cta_bf16]"),
    ),
    Mutation(
        "topk-bf16-tiny-below-zero", "tiny scores below zero, which share its bf16, are not looked at again",
        OPS + "topk/primitives/bf16_select.py",
        "span = tl.where(bf16 == 0, OF_ZERO, OF_OTHERS)",
        "span = tl.where(bf16 == 0, OF_OTHERS, OF_OTHERS)",
        ("tests/test_topk.py::test_kernel_scores_that_share_a_bf16[700-single_cta_bf16]",),
    ),
    Mutation(
        "topk-bf16-nothing-counted", "beside the lowest scores, what is not to be selected is counted",
        OPS + "topk/primitives/bf16_select.py",
        "least = tl.minimum(least, bf16_keys.MINUS_INF - (histogram.BINS - 1))",
        "least = tl.minimum(least, bf16_keys.MINUS_INF)",
        ("tests/test_topk.py::test_kernel_scores_that_share_a_bf16[700-single_cta_bf16]",),
    ),
    Mutation(
        "topk-bf16-bound-believed",
        "scores below the lowest of the threads' maxima are not counted even where they are needed",
        OPS + "topk/primitives/bf16_select.py", "going = (digit == last) & (last < histogram.BINS - 1)",
        "going = digit < 0",
        ("tests/test_topk.py::test_kernel_a_score_above_all_others_in_every_thread[200]",),
    ),
    Mutation(
        "topk-grouped-any-of-equals", "of more groups that share the k-th's bf16 than fit, the first are searched",
        OPS + "topk/algorithms/group_maxima.py",
        "need = tl.where(below + in_bin <= CAPACITY, in_bin, k - below)",
        "need = in_bin",
        ("tests/test_topk_grouped.py::test_kernel_groups_that_share_a_bf16[700]",),
    ),
    Mutation(
        "topk-grouped-one-not-held", "a row of one group more than is held loses it",
        OPS + "topk/algorithms/group_maxima.py",
        "whole = end <= HELD",
        "whole = end <= HELD + 8",
        ("tests/test_topk_grouped.py::test_kernel[equal]", "tests/test_topk_grouped.py::test_kernel[ascending]"),
    ),
    Mutation(
        "scores-entry-of-the-tile-before", "a tile's keys come from the block of the tile before",
        OPS + "index_logits/portable/kernels.py",
        "next_entry = _entry(table, (begin + step) // block_size, max_blocks)",
        "next_entry = _entry(table, begin // block_size, max_blocks)",
        ("tests/test_index_logits.py::test_paged_kernel",),
    ),
    Mutation(
        "scores-last-group-left-out", "a last group that is not whole has no highest score",
        OPS + "index_logits/portable/kernels.py",
        "(group * GROUP < max_context)[:, None]",
        "(group * GROUP + GROUP <= max_context)[:, None]",
        ("tests/test_index_logits.py::test_paged_kernel_gives_the_highest_of_groups",),
    ),
    Mutation(
        "topk-offers-unchecked", "what one CTA did not offer is not looked for",
        OPS + "topk/algorithms/multi_cta.py",
        "enough = cutoff.to(tl.uint32, bitcast=True) <= bound",
        "enough = bound == bound",
        ("tests/test_topk.py::test_kernel_highest_scores_in_one_cta[1]",),
    ),
    Mutation(
        "slots-of-another-request", "a selected row is mapped by another request's blocks",
        OPS + "topk/primitives/output.py",
        "blocks = block_table + row // next_n * stride_table_request",
        "blocks = block_table + row // (next_n + 1) * stride_table_request",
        ("tests/test_topk_slots.py::test_kernel[thresholds.single_cta]",),
    ),
    Mutation(
        "index-topk-rows-by-request", "head weights of later chunks are cut by request, not by row",
        OPS + "index_topk/launch.py",
        "q[some], cache, weights[rows], context_lens[some]",
        "q[some], cache, weights[some], context_lens[some]",
        ("tests/test_index_topk.py::test_decode_kernel[fp8]",),
    ),
    Mutation(
        "ragged-offset-of-none", "an offset turns -1 into a row",
        OPS + "ragged/kernels.py",
        "        keep = keep & (local >= 0)\n",
        "",
        ("tests/test_ragged.py::test_kernel_build_equals_reference",),
    ),
    Mutation(
        "window-one-key-too-long", "a window starts a key early",
        OPS + "ragged/kernels.py",
        "first = tl.maximum(position - window + 1, 0)",
        "first = tl.maximum(position - window, 0)",
        ("tests/test_ragged_windows.py::test_kernel[check_windows]",),
    ),
    Mutation(
        "lookback-passes-over-a-row", "of rows that only know their counts yet, every 33rd is left out",
        OPS + "ragged/kernels.py",
        "nearest = tl.where(stop < LOOKBACK, -1, nearest - LOOKBACK)",
        "nearest = tl.where(stop < LOOKBACK, -1, nearest - LOOKBACK - 1)",
        ("tests/test_ragged.py::test_kernel_adds_counts_up_to_the_nearest_total",),
    ),
    Mutation(
        "plan-ignores-padding", "a row without a slot is a row of its request",
        OPS + "step_plan/kernels.py",
        "valid = (request >= 0) & (position >= 0) & (slot >= 0)",
        "valid = (request >= 0) & (position >= 0)",
        ("tests/test_step_plan.py::test_kernel_equals_reference",),
    ),
    Mutation(
        "entry-limit-divided-early", "entry limits are divided before the row itself counts",
        OPS + "step_plan/kernels.py",
        "limit = done // RATIO",
        "limit = (done - 1) // RATIO",
        ("tests/test_compressed_plan.py::test_compressed_kernel[mixed]",),
    ),
    Mutation(
        "latent-scale-of-previous-group", "656-byte records: a group is scaled as the one before",
        OPS + "kv_cache/kernels.py",
        "scale_at = (base + SCALE_AT).to(tl.pointer_type(tl.float32))[:, None] + group[None, :]",
        "scale_at = (base + SCALE_AT).to(tl.pointer_type(tl.float32))[:, None] + tl.maximum(group - 1, 0)[None, :]",
        ("tests/test_kv_cache.py::test_gather_kernel_equals_reference[latent_fp8/512+64/128/e4m3fn/raw]",),
    ),
    Mutation(
        "planar-scale-plane-unpadded", "584-byte layout: scales are taken to follow each other without padding",
        OPS + "kv_cache/kernels.py",
        "plane = block_at + block_size.to(tl.int64) * RECORD + within * SCALE_BYTES",
        "plane = block_at + block_size.to(tl.int64) * RECORD + within * GROUPS",
        ("tests/test_kv_cache_planar.py::test_gather_kernel",),
    ),
    Mutation(
        "exponent-rounded-down", "a power-of-two scale may be smaller than what it must hold",
        "sparse_attn/device/fp8.py",
        "return ((bits + 0x7FFFFF) & 0x7F800000).to(tl.float32, bitcast=True)",
        "return (bits & 0x7F800000).to(tl.float32, bitcast=True)",
        ("tests/test_kv_cache_planar.py::test_kernel_writes_the_reference_bytes",),
    ),
    Mutation(
        "compressor-halves-swapped", "an entry takes its own half from the window before and the other way round",
        OPS + "compressor/kernels.py",
        "part = tl.where(place < RATIO, 0, DIM) if OVERLAP",
        "part = tl.where(place < RATIO, DIM, 0) if OVERLAP",
        ("tests/test_compressor.py::test_kernels_match_reference[4-True-plain/fp32/32+0]",),
    ),
    Mutation(
        "compressor-rope-at-window-end", "an entry is rotated by its last token's position",
        OPS + "compressor/kernels.py",
        "first = position + 1 - RATIO",
        "first = position",
        ("tests/test_compressor.py::test_kernels_match_reference[8-False-plain/fp32/32+0]",),
    ),
    Mutation(
        "attention-keys-before-the-split", "where the last tile moves back, it counts keys before its split",
        OPS + "attention/portable/kernels.py",
        "inside = (key - (start - at)).to(tl.uint32, bitcast=True) < (end - start).to(tl.uint32)",
        "inside = (key - (start - at)) < (end - start)",
        ("tests/test_attention.py::test_prefill_kernel",),
    ),
    Mutation(
        "attention-int32-offset", "the offset of a key is computed in 32 bits",
        OPS + "attention/portable/kernels.py",
        "offset = slot.to(tl.int64) * stride_cache_slot",
        "offset = slot * stride_cache_slot",
        ("tests/test_far_offsets.py::test_attention_over_rows_side_by_side",),
    ),
    Mutation(
        "sink-in-every-split", "a sink is counted in every split of a row, and once more when they are combined",
        OPS + "attention/portable/kernels.py",
        "    if SPLIT:\n        tl.store(lse_at, lse2, mask=known_head)\n    else:\n        if sink is not None:\n"
        "            acc = acc * sink_factor(tl.load(sink + head, mask=known_head, other=0.0), lse2)[:, None]\n",
        "    if sink is not None:\n"
        "        acc = acc * sink_factor(tl.load(sink + head, mask=known_head, other=0.0), lse2)[:, None]\n"
        "    if SPLIT:\n        tl.store(lse_at, lse2, mask=known_head)\n    else:\n",
        ("tests/test_attention.py::test_decode_kernel",),
    ),
    Mutation(
        "combine-of-empty-splits", "a row without keys combines to NaN",
        OPS + "attention/portable/kernels.py",
        "weight = tl.exp2((found - tl.where(m == float(\"-inf\"), 0.0, m)) * to_log2)",
        "weight = tl.exp2((found - m) * to_log2)",
        ("tests/test_attention.py::test_merge_kernel",),
    ),
    Mutation(
        "splits-of-two-caches-overlap", "a split that starts in the first cache takes a whole split of the second",
        OPS + "attention/portable/kernels.py",
        "tl.maximum(extra_first + keys, 0))",
        "tl.maximum(extra_first, 0) + keys)",
        ("tests/test_attention_two_caches.py::test_kernel",),
    ),
    Mutation(
        "router-weights-biased", "experts are weighted by the scores that chose them",
        OPS + "router/kernels.py",
        "score = tl.reshape(score, [ROWS, GROUPS_PADDED * SIZE_PADDED])",
        "score = tl.reshape(biased, [ROWS, GROUPS_PADDED * SIZE_PADDED])",
        ("tests/test_router.py::test_kernel_matches_reference",),
    ),
    Mutation(
        "sinkhorn-one-fewer", "Sinkhorn's normalisation ends an iteration early",
        OPS + "hyper_connection/kernels.py",
        "for _ in range(iterations - 1):",
        "for _ in range(iterations - 2):",
        ("tests/test_hyper_connection.py::test_kernels_match_reference",),
    ),
]

PYTHON = [
    Mutation(
        "combine-that-does-not-wait", "a combine that starts while its partials are written reads them",
        OPS + "attention/portable/kernels.py",
        "    pdl.wait(PDL)\n    token = tl.program_id(0)",
        "    token = tl.program_id(0)",
        ("tests/test_aot.py::test_a_launch_that_starts_early_waits_before_it_reads",),
    ),
    Mutation(
        "fnuz-maximum", "e4m3fnuz is written up to 240, which readers of e4m3fn bytes do not expect",
        "sparse_attn/fp8.py",
        '"e4m3fnuz": 224.0',
        '"e4m3fnuz": 240.0',
        ("tests/test_layout.py::test_fnuz_bytes_are_those_of_fn_and_the_scale_doubles",),
    ),
    Mutation(
        "output-keeps-its-rope", "V4's output is not rotated back",
        "sparse_attn/models/windowed.py",
        "    out = apply_rope(out, plan.positions, rope, start=spec.nope_dim, interleaved=True, inverse=True)\n",
        "",
        ("tests/test_models_v4.py::test_parity_with_transformers[infinite sinks]",),
    ),
    Mutation(
        "gate-in-model-dtype", "experts are chosen by gate logits in bf16",
        "sparse_attn/models/moe.py",
        'logits = F.linear(x.float(), params[prefix + "gate"])',
        'logits = F.linear(x, params[prefix + "gate"].to(x.dtype)).float()',
        ("tests/test_models.py::test_gate_logits_are_not_rounded",),
    ),
    Mutation(
        "kv-b-heads-interleaved", "W_UK and W_UV of a head are every n-th row of kv_b",
        "sparse_attn/models/spelling.py",
        "kv_b = checkpoint.read(source, (heads * both, spec.kv_lora)).unflatten(0, (heads, both))",
        "kv_b = checkpoint.read(source, (heads * both, spec.kv_lora)).unflatten(0, (both, heads)).transpose(0, 1)",
        ("tests/test_loading.py::test_published_spelling[1]",),
    ),
    Mutation(
        "plan-key-without-decodes", "a cached plan serves a step with other decodes",
        "sparse_attn/runtime/plan_cache.py",
        "shape, cached = (requests, tokens, num_decodes, next_n), self._key",
        "shape, cached = (requests, tokens, next_n), self._key",
        ("tests/test_plan_cache.py::test_key_is_complete",),
    ),
    Mutation(
        "sampling-highest-id-at-the-border", "of equal logits at the border of top-k the highest ids may be drawn",
        OPS + "sampling/filters.py",
        "(ids <= border_id)",
        "(ids >= border_id)",
        ("tests/test_sampling_filters.py::test_ties_at_the_border_go_to_the_lowest_ids",),
    ),
    Mutation(
        "sampling-top-p-of-all", "top-p takes its share of all tokens, not of those that top-k kept",
        OPS + "sampling/filters.py",
        "mass = torch.where(inside, _weights(ranked, ranked[:, :1], scale), 0)",
        "mass = _weights(ranked, ranked[:, :1], scale)",
        ("tests/test_sampling_filters.py::test_the_kept_tokens_are_the_oracles",),
    ),
    Mutation(
        "sampling-prompt-presence", "presence and frequency penalties are charged to tokens of the prompt",
        OPS + "sampling/filters.py",
        "torch.where(drawn, once + each * counts, 0.0)",
        "torch.where(seen, once + each * counts, 0.0)",
        ("tests/test_sampling_filters.py::test_penalties_are_the_oracles",),
    ),
    Mutation(
        "first-token-not-counted", "penalties do not know of the token that prefill drew",
        "sparse_attn/runtime/steps.py",
        "count_drawn(state.draws, tokens, torch.ones_like(tokens, dtype=torch.bool), whose)",
        "count_drawn(state.draws, tokens, torch.zeros_like(tokens, dtype=torch.bool), whose)",
        ("tests/test_draws.py::test_penalties_count_the_prompt_and_what_was_drawn",),
    ),
    Mutation(
        "decode-draws-a-position-late", "decode draws with the noise of the token drawn, prefill with that of the one fed",
        "sparse_attn/runtime/steps.py",
        "draw(logits, state.seq_lens - 1, sampling, ",
        "draw(logits, state.seq_lens, sampling, ",
        ("tests/test_generate.py::test_noise_is_that_of_the_position_that_was_fed",),
    ),
    Mutation(
        "attention-fewer-keys-not-reserved", "scratch is reserved for rows of the most keys, which may be split less often",
        OPS + "attention/hopper/config.py",
        "for fewer in range(1, units + 1)",
        "for fewer in (units,)",
        ("tests/test_attention_decode_fp8.py::test_scratch_that_is_reserved",),
    ),
    Mutation(
        "attention-block-strides-not-asked", "a Hopper kernel takes blocks that 16-byte loads cannot read",
        OPS + "attention/hopper/config.py",
        "if stride * element % LOAD_BYTES:",
        "if stride % LOAD_BYTES and element > 1:",
        ("tests/test_attention_dispatch.py::test_every_cliff_has_its_reason",),
    ),
    Mutation(
        "workspace-shrinks-counters", "growing for scratch drops counters that were reserved",
        "sparse_attn/workspace.py",
        "self._allocate(largest((self.size, size)))",
        "self._allocate(size)",
        ("tests/test_workspace.py::test_growth_of_one_keeps_the_other",),
    ),
    Mutation(
        "error-leaves-counters", "an op that raises leaves what its kernels counted",
        "sparse_attn/workspace.py",
        "if error is not None and counters:",
        "if False:",
        ("tests/test_workspace_threads.py::test_an_error_in_the_middle_of_an_op_leaves_counters_zero_and_the_workspace_free",),
    ),
    Mutation(
        "workspace-without-turns", "launches of two threads' ops interleave over one workspace",
        "sparse_attn/workspace.py",
        "        if _running.ops:\n",
        "        if False:\n",
        ("tests/test_workspace_threads.py::test_launches_of_ops_that_share_a_workspace_do_not_interleave",),
    ),
    Mutation(
        "current-device-launches", "ops launch on the current device, wherever their tensors are",
        "sparse_attn/registration.py",
        "        if streams.is_current(home):\n",
        "        if True:\n",
        ("tests/test_devices.py::test_an_op_runs_on_the_device_of_its_tensors",),
    ),
    Mutation(
        "gradient-lost-in-a-cache", "weights that reach the logits through entries alone get no gradient, in silence",
        "sparse_attn/models/windowed.py",
        '        q = gradients.end(q, "sparse_attn::compress_and_cache", *pooled)\n',
        "",
        ("tests/test_gradients.py::test_a_model_runs_forward_and_refuses_backward",),
    ),
    Mutation(
        "prefill-reads-the-first-request", "rows of every prefill request attend to keys of the first",
        "sparse_attn/pipeline/latent.py",
        "chosen, num_rows=plan.kv_capacity, row_offsets=plan.kv_start, impl=impl",
        "chosen, num_rows=plan.kv_capacity, impl=impl",
        ("tests/test_pipeline.py::test_against_dense_oracle",),
    ),
    Mutation(
        "hopper-stages-change-hands", "which consumer takes a stage of scores depends on what came before",
        "sparse_attn/ops/index_logits/hopper/common.py",
        "return (turn - done % TURNS + TURNS) % TURNS",
        "return (turn + done) % TURNS",
        ("tests/test_index_logits_hopper.py::test_stages_keep_their_consumers",),
    ),
    Mutation(
        "scores-lines-unseen", "rows that begin between lines are given to TMA, which copies lines",
        "sparse_attn/ops/index_logits/dispatch.py",
        "if width is not None and (stride * itemsize % LINE or stride < width):",
        "if width is not None and stride < width:",
        ("tests/test_index_logits_dispatch.py::test_why_hopper_kernels_are_passed_over",),
    ),
    Mutation(
        "scores-by-number-of-rows", "few rows are scored by another kernel, and so by other bits",
        "sparse_attn/ops/index_logits/dispatch.py",
        "    heads, dim = problem.heads, problem.dim\n    return (",
        "    heads, dim = problem.heads, problem.dim\n    if problem.rows < 8:\n        return no('rows: got few, allowed: 8')\n    return (",
        ("tests/test_index_logits_hopper.py::test_the_number_of_rows_chooses_no_kernel",),
    ),
]

ATTENTION, SCORES = OPS + "attention/", OPS + "index_logits/"

HOPPER = [
    Mutation(
        "hopper-rows-behind-the-last", "bf16 rows behind the last are copied and scored",
        ATTENTION + "hopper/prefill_bf16.py",
        "kv_valid1 = _in_rows(slot1, inputs.num_rows)",
        "kv_valid1 = slot1 >= 0",
        ("tests/test_attention_prefill_bf16.py::test_kinds_of_rows[64-512-full-random]",),
    ),
    Mutation(
        "hopper-rows-handed-out-once", "the tile counter stays where the first launch left it",
        ATTENTION + "hopper/prefill_bf16.py",
        "gl.store(inputs.tile_counter, 0)",
        "gl.store(inputs.tile_counter, inputs.num_work_tiles)",
        ("tests/test_attention_prefill_bf16.py::test_replays_take_their_work_tiles_anew[400]",),
    ),
    Mutation(
        "hopper-denominator-not-rescaled", "an even tile's denominator stays at its own maximum",
        ATTENTION + "hopper/seesaw.py",
        "    l = l * rescale\n    smem.row_sum.index(0).store(l)",
        "    smem.row_sum.index(0).store(l)",
        ("tests/test_attention_growing_scores.py::test_hopper_kernels[plain/bf16/512+0-64-spikes]",),
    ),
    Mutation(
        "hopper-half-of-the-rows-rescaled", "a warp whose first eight rows kept their maximum rescales none",
        ATTENTION + "hopper/lazy_rescale.py",
        "setp.neu.or.f32 other, ${first + 2}",
        "setp.neu.or.f32 other, ${first}",
        ("tests/test_attention_growing_scores.py::test_hopper_kernels[plain/bf16/512+0-64-spikes]",),
    ),
    Mutation(
        "few-heads-first-reference-kept", "swap-AB's P stays relative to the first tile's maximum",
        ATTENTION + "hopper/swap_ab.py",
        "if (tile == 0) | (gl.max(smem.p_max.index(zero).load(EVERYWHERE), 0) > MAX_P):",
        "if tile == 0:",
        ("tests/test_attention_growing_scores.py::test_hopper_kernels[plain/bf16/512+0-10-steps]",),
    ),
    Mutation(
        "hopper-empty-row-divided", "a row without keys is divided by its row sum, 0",
        ATTENTION + "hopper/common.py",
        "gl.where(empty, 0.0, 1.0 / gl.where(empty, 1.0, l))",
        "1.0 / l",
        ("tests/test_attention_prefill_bf16.py::test_kinds_of_rows[64-512-none-None]",),
    ),
    Mutation(
        "hopper-scales-of-the-first-part", "all of half a planar record takes the scales of its first part",
        ATTENTION + "hopper/dequant.py",
        "shift = (group + first // GROUP) * 8",
        "shift = group * 8",
        ("tests/test_attention_decode_fp8.py::test_every_code_and_every_scale",),
    ),
    Mutation(
        "hopper-subnormal-scale", "the scale 2^-127 is taken for 0",
        ATTENTION + "hopper/dequant.py",
        "gl.where(exponents == 0, 0x00400040, exponents * 0x00800080)",
        "exponents * 0x00800080",
        ("tests/test_attention_decode_fp8.py::test_every_code_and_every_scale",),
    ),
    Mutation(
        "hopper-left-halves-as-short-as-right-ones", "the last codes of a planar record's left half are not read",
        ATTENTION + "hopper/dequant.py",
        "missing = half ",
        "missing = 1 ",
        ("tests/test_attention_decode_fp8.py::test_every_code_and_every_scale[8]",),
    ),
    Mutation(
        "hopper-left-halves-of-whole-rows-as-short", "the same, where rows are whole",
        ATTENTION + "hopper/dequant.py",
        "GROUPS - half if record.PLANAR and STATIC_HALF",
        "GROUPS - 1 if record.PLANAR and STATIC_HALF",
        ("tests/test_attention_decode_fp8.py::test_every_code_and_every_scale[256]",),
    ),
    Mutation(
        "hopper-keys-that-are-not-there", "keys that no index names score as zeros instead of nothing",
        ATTENTION + "hopper/dequant.py",
        "smem.kv_valid.index(here).store(kv_valid.to(gl.int32))",
        "smem.kv_valid.index(here).store(kv_valid.to(gl.int32) | 1)",
        ("tests/test_attention_decode_fp8_latents.py::test_kinds_of_rows[64-random-None]",),
    ),
    Mutation(
        "hopper-last-share-lost", "tiles that do not divide evenly among a row's splits are attended by none",
        ATTENTION + "hopper/dequant.py",
        "tiles_per_split = (end + gl.num_programs(1) - 1) // gl.num_programs(1)",
        "tiles_per_split = end // gl.num_programs(1)",
        ("tests/test_attention_decode_fp8_latents.py::test_kinds_of_rows[64-random-None]",),
    ),
    Mutation(
        "hopper-scales-of-shares-swapped", "each half of a partial gets the other's scale",
        ATTENTION + "hopper/seesaw.py",
        "gl.store(to.scale + 2 * gl.arange(0, BLOCK_M, layout=ROW) + half, up * factor)",
        "gl.store(to.scale + 2 * gl.arange(0, BLOCK_M, layout=ROW) + (1 - half), up * factor)",
        ("tests/test_attention_decode_fp8_latents.py::test_shares_of_any_size[1.0-300]",),
    ),
    Mutation(
        "hopper-merge-of-the-last-part-at-the-first", "partials of a step's tail wave are looked for behind its own",
        ATTENTION + "hopper/combine.py",
        "row = gl.where(first, row, row - tokens)",
        "row = gl.where(first, row, row)",
        ("tests/test_attention_split_kv.py::test_combine[False-2-16-3]",),
    ),
    Mutation(
        "hopper-later-states-lost", "of more splits than are combined at a time the first ones count",
        ATTENTION + "hopper/combine.py",
        "for begin in range(0, splits, BLOCK_S):",
        "for begin in range(0, gl.minimum(splits, BLOCK_S), BLOCK_S):",
        ("tests/test_attention_split_kv.py::test_combine[False-70-None-3]",),
    ),
    Mutation(
        "hopper-second-head-weighed-as-the-first", "of a combining CTA's two heads both go by the first one's lse",
        ATTENTION + "hopper/combine.py",
        "gl.load(lse_partial + place + gl.expand_dims(half // 2, 0)",
        "gl.load(lse_partial + place + gl.expand_dims(half // 4, 0)",
        ("tests/test_attention_split_kv.py::test_combine[False-2-None-4]",),
    ),
    Mutation(
        "few-heads-int32-offsets", "offsets of records behind 2^31 words wrap",
        ATTENTION + "hopper/swap_ab_load.py",
        "return slots.to(gl.int64) * TOKEN",
        "return slots * TOKEN",
        ("tests/test_attention_swap_ab.py::test_offsets_beyond_2_31",),
    ),
    Mutation(
        "few-heads-second-cache-by-the-first", "slots of a second cache are held against the size of the first",
        ATTENTION + "hopper/swap_ab_load.py",
        "num_slots = gl.where(tile >= source.own.tiles, source.extra_kv.num_slots, num_slots)",
        "num_slots = num_slots",
        ("tests/test_attention_swap_ab.py::test_two_caches[full-16]",),
    ),
    Mutation(
        "few-heads-scales-of-the-left-half", "codes of a right half are multiplied by the left one's scales",
        ATTENTION + "hopper/swap_ab_load.py",
        "scales.slice(GROUPS, GROUPS, dim=1)",
        "scales.slice(0, GROUPS, dim=1)",
        ("tests/test_attention_swap_ab.py::test_every_code_and_large_scales",),
    ),
    Mutation(
        "hopper-relu-hides-nan", "relu of a NaN product is 0",
        SCORES + "hopper/common.py",
        "product + gl.abs(product)",
        "gl.maximum(product, 0.0) * 2.0",
        ("tests/test_index_logits_hopper.py::test_a_nan_key_scores_nan",),
    ),
    Mutation(
        "hopper-tiles-lost", "tiles that do not divide evenly among CTAs are scored by none",
        SCORES + "hopper/common.py",
        "return begin, begin + each + (cta < more).to(gl.int32)",
        "return begin, begin + each",
        ("tests/test_index_logits_hopper.py::test_rows[causal-64-True]",),
    ),
    Mutation(
        "hopper-weights-of-the-other-rows", "the second half of the columns is weighed as the first",
        SCORES + "hopper/prefill.py",
        ".slice(PRODUCT * COLUMNS, COLUMNS).load(COLUMN)",
        ".slice(0, COLUMNS).load(COLUMN)",
        ("tests/test_index_logits_hopper.py::test_rows[causal-64-True]",),
    ),
    Mutation(
        "hopper-blocks-outside-the-cache", "blocks that are not in the cache score like zeros",
        SCORES + "hopper/paged.py",
        "kv_valid = (block >= 0) & (block < num_blocks)",
        "kv_valid = block >= 0",
        ("tests/test_index_logits_hopper.py::test_paged[1-64-True]",),
    ),
    Mutation(
        "hopper-one-position-too-many", "a row sees the position at its length",
        SCORES + "hopper/paged.py",
        "position < gl.minimum(limit, end)",
        "position <= gl.minimum(limit, end)",
        ("tests/test_index_logits_hopper.py::test_paged[1-64-True]",),
    ),
    Mutation(
        "hopper-ends-of-other-tiles", "what says that a block is none of the cache's lies with another tile's keys",
        SCORES + "hopper/paged.py",
        "ends.index(stage).store(",
        "ends.index(stage ^ 1).store(",
        ("tests/test_index_logits_hopper.py::test_paged[1-64-True]",),
    ),
    Mutation(
        "hopper-last-group-open", "what lies behind a row's last score stays in its last group",
        SCORES + "hopper/paged.py",
        "written = (limit + GROUP - 1) // GROUP * GROUP",
        "written = limit",
        ("tests/test_index_logits_hopper.py::test_paged_gives_the_highest_of_groups[1-64]",),
    ),
]
# fmt: on

MUTATIONS = [
    *(mutation._replace(interpreted=True) for mutation in KERNELS),
    *PYTHON,
    *(mutation._replace(gpu=True) for mutation in HOPPER),
]
