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


MUTANTS = [half_of_top_k, keys_not_written, latents_not_written, plan_of_the_step_before, ties_turned_round]


def main() -> None:
    job = json.load(sys.stdin)
    if job.get("mutant"):
        from sparse_attn.integrations.vllm import backend, register

        register()
        from sparse_attn.integrations.vllm import layer

        next(mutant for mutant in MUTANTS if mutant.__name__ == job["mutant"])(layer, backend)
    from vllm import LLM, SamplingParams

    llm = LLM(model=job["model"], skip_tokenizer_init=True, **job["args"])
    params = [
        SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, detokenize=False) for count in job["counts"]
    ]
    prompts = [dict(prompt_token_ids=prompt) for prompt in job["prompts"]]
    found = arriving(llm.llm_engine, prompts, params) if job.get("arriving") else llm.generate(prompts, params)
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
