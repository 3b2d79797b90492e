"""A process with one vLLM engine: a job in JSON on standard input, its tokens on a line of its output. See test_vllm.py.

mutant: a fault that is put into the integration, by name. arriving: requests are added over time, not at once.
"""

import json
import random
import sys

import torch


def half_of_top_k(layer, backend):
    whole = layer.index_select
    layer.index_select = lambda *args, top_k, **kwargs: whole(*args, top_k=top_k // 2, **kwargs)


def keys_not_written(layer, backend):
    layer.write_index_keys = lambda *args, **kwargs: None


def latents_not_written(layer, backend):
    backend.write_kv_cache = lambda *args, **kwargs: None


def plan_of_the_step_before(layer, backend):
    build, plans = backend.SparseAttnMetadata.plan, []

    def late(metadata):
        plans.append(build(metadata))
        before = plans[max(len(plans) - 2, 0)]
        return before if before.positions.shape == plans[-1].positions.shape else plans[-1]

    backend.SparseAttnMetadata.plan = late


def ties_turned_round(layer, backend):
    """Of equal scores the last: the first of the columns in the opposite order."""
    from sparse_attn.ops.topk.select import reference

    def last(logits, row_starts, row_ends, k):
        width = logits.shape[1]
        starts = torch.zeros(len(logits), dtype=torch.int32) if row_starts is None else row_starts
        ends = torch.full_like(starts, width) if row_ends is None else row_ends
        found = first(logits.flip(1), width - ends, width - starts, k)
        keys = torch.where(found < 0, width, (ends - starts).unsqueeze(1) - 1 - found).sort(1).values
        return torch.where(keys == width, -1, keys).to(found.dtype)

    first, reference.top_k_per_row = reference.top_k_per_row, last


def half_of_the_entries(layer, backend):
    from sparse_attn.integrations.vllm import windowed

    whole = windowed.select_entries
    windowed.select_entries = lambda *args, top_k, **kwargs: whole(*args, top_k=top_k // 2, **kwargs)


def half_of_the_window(layer, backend):
    from sparse_attn.integrations.vllm import windowed

    whole = windowed.plan_windows
    windowed.plan_windows = lambda *args, window, **kwargs: whole(*args, window=window // 2, **kwargs)


def no_sink(layer, backend):
    from sparse_attn.integrations.vllm import windowed

    whole = windowed.attend
    windowed.attend = lambda *args, sink, **kwargs: whole(*args, sink=None, **kwargs)


def entries_in_the_slot_before(layer, backend):
    from sparse_attn.integrations.vllm import windowed

    build = windowed.WindowedMetadataBuilder.build

    def shifted(self, *args, **kwargs):
        found = build(self, *args, **kwargs)
        if getattr(self.kv_cache_spec, "tokens_per_state", 1) > 1:
            found.slot_mapping = torch.where(found.slot_mapping > 0, found.slot_mapping - 1, found.slot_mapping)
        return found

    windowed.WindowedMetadataBuilder.build = shifted


MUTANTS = [
    half_of_top_k, keys_not_written, latents_not_written, plan_of_the_step_before, ties_turned_round,
    half_of_the_entries, half_of_the_window, no_sink, entries_in_the_slot_before,
]  # fmt: skip


def watch_v4(worst):
    """Have attention of decode rows, and of every seventh of more, compared with what its caches say: its error over
    the largest value."""
    from vllm.forward_context import get_forward_context

    from sparse_attn.integrations.vllm import windowed

    attention = windowed.SparseAttnWindowedAttention
    run = attention._sparse_indexer_and_attn

    def watched(self, hidden, index_q, index_q_scale, index_weights, q, kv, positions, out):
        run(self, hidden, index_q, index_q_scale, index_weights, q, kv, positions, out)
        metadata = get_forward_context().attn_metadata
        if metadata is None:
            return
        owners = metadata[self.swa_cache_layer.prefix].token_to_req_indices
        for row in range(0, len(owners), 1 if len(owners) <= 8 else 7):
            at = int(positions[row])

            def keys(layer, prefix, layout, places):
                held, table = layer.kv_cache.shape[1], metadata[prefix].block_table[owners[row]]
                slots = table[places // held].long() * held + places % held
                return layout.decode(layer.kv_cache, slots).float()

            window = torch.arange(max(0, at - self.window_size + 1), at + 1)
            values = [keys(self.swa_cache_layer, self.swa_cache_layer.prefix, self.layouts.kv, window)]
            if self.compress_ratio > 1:
                entries = torch.arange((at + 1) // self.compress_ratio)
                if self.indexer is not None and len(entries) > self.indexer.topk_tokens:
                    cache = self.indexer.k_cache
                    index_keys = keys(cache, cache.prefix, self.layouts.index, entries)
                    scores = (index_q[row].float() @ index_keys.T).relu().T @ index_weights[row].float()
                    entries = scores.sort(descending=True, stable=True).indices[: self.indexer.topk_tokens]
                values.append(keys(self, self.prefix, self.layouts.kv, entries))
            value = torch.cat(values)
            scores = torch.cat([q[row].float() @ value.T * self.scale, self.attn_sink.unsqueeze(1)], 1)
            want = scores.softmax(-1)[:, :-1] @ value
            worst.append(float((out[row].float() - want).abs().max() / want.abs().max()))

    attention._sparse_indexer_and_attn = watched


def main() -> None:
    job, worst = json.load(sys.stdin), []
    if job.get("mutant") or job.get("watch_v4"):
        from sparse_attn.integrations.vllm import backend, register

        register()
        from sparse_attn.integrations.vllm import layer

        for mutant in MUTANTS:
            if mutant.__name__ == job.get("mutant"):
                mutant(layer, backend)
        if job.get("watch_v4"):
            watch_v4(worst)
    from vllm import LLM, SamplingParams

    llm = LLM(model=job["model"], skip_tokenizer_init=True, **job["args"])
    params = [
        SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False) for count in job["counts"]
    ]
    prompts = [dict(prompt_token_ids=prompt) for prompt in job["prompts"]]
    found = arriving(llm.llm_engine, prompts, params) if job.get("arriving") else llm.generate(prompts, params)
    print(f"\nWORST {max(worst, default=0.0):.5f} OF {len(worst)}")
    print("\nTOKENS", json.dumps([list(one.outputs[0].token_ids) for one in found]))


def arriving(engine, prompts, params):
    order, left, done = random.Random(1), list(range(len(prompts))), {}
    while left or engine.has_unfinished_requests():
        for _ in range(min(len(left), order.choice((0, 0, 1, 3)))):
            at = left.pop(0)
            engine.add_request(str(at), prompts[at], params[at])
        done |= {int(one.request_id.split("-")[0]): one for one in engine.step() if one.finished}
    return [done[at] for at in range(len(prompts))]


if __name__ == "__main__":
    main()
