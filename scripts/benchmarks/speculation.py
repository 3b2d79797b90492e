"""Decode time a token with drafts against none, captured: drafts that are all right, and those of the byte readers."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from benchmarks.loops import BLOCK, four_layers, model_of, state_of, wall_us
from benchmarks.record import Record
from benchmarks.registry import suite
from benchmarks.run import Run
from sparse_attn import DecodeGraph, Model, generate
from sparse_attn.checkpoints.load import load, predicted_layers, read_config
from sparse_attn.cli.documents import held_out_text
from sparse_attn.cli.shipped import folder_of
from sparse_attn.models.deepseek_v32 import allocate_caches
from sparse_attn.pipeline import cache_layouts

DRAFTS = 2
REQUESTS = (1, 8, 64)


@suite("speculation")
def speculation(run: Run) -> Iterator[Record]:
    "A token's time with 2 drafts against none: 4 layers of V3.2's dims, all accepted; the readers by their own layer."
    yield from _all_accepted(run)
    for name in ("reader-v32", "reader-v4"):
        yield from _reader(run, name)


def _all_accepted(run: Run) -> Iterator[Record]:
    """Drafts are what a loop that speculates drew before: other row counts round otherwise, and random weights make
    many tokens nearly as likely as the drawn one. The share of tokens that equal those without drafts is named."""
    spec = four_layers(run)
    context, steps = run.pick(8192, 128), run.pick(60, 2)
    width, start, most = context // BLOCK, context // 2, steps * (DRAFTS + 1)
    if run.dry:
        yield Record("V3.2 dims, 1 request, all accepted", 0.0)
        return
    model = model_of(spec, run.device)
    for batch in REQUESTS:
        caches = allocate_caches(spec, model.layouts, batch * width, BLOCK, run.device)
        state = state_of(batch, start, width, run.device)
        common = dict(max_context=context, max_blocks=width, buckets=(batch,))
        known = torch.zeros(batch, 1, dtype=torch.int64, device="cpu")
        table = torch.full((batch, most), -1, dtype=torch.int64, device=run.device)  # tokens behind the first input

        def drafter(known, seq_lens, table=table):
            at = seq_lens.long().unsqueeze(1) - start + torch.arange(DRAFTS, device=seq_lens.device)
            return table.gather(1, at.clamp(0, most - 1))

        def replay(loop, count, state=state, known=known):
            loop.load(state.tokens, state.seq_lens, state.block_table, known=known if loop.known is not None else None)
            return loop.run(count)

        plain = DecodeGraph(model, caches, **common)
        slow = wall_us(lambda plain=plain, replay=replay: replay(plain, most), most)
        loop = DecodeGraph(model, caches, speculate=DRAFTS, drafter=drafter, **common)
        drawn = replay(loop, most).wait()
        own = [row[row >= 0][:most] for row in drawn.transpose(0, 1).flatten(1)]
        equal = (torch.stack(own).t() == replay(plain, most).wait()).double().mean()
        table.copy_(torch.stack(own))
        taken = int((replay(loop, steps).wait() >= 0).sum()) / steps / batch
        fast = wall_us(lambda loop=loop, replay=replay: replay(loop, steps), steps) / taken
        name = f"V3.2 dims, {batch} requests, {taken:.2f} tokens a step, {100 * equal:.1f}% equal"
        yield Record(name, fast, "no drafts", slow)


def _reader(run: Run, name: str) -> Iterator[Record]:
    """Generations of held-out text. An equal share below 100% is rounding by another number of rows."""
    folder = folder_of(name)
    if not predicted_layers(read_config(folder)[0]):
        return
    new, length = run.pick((129, 512), (4, 20))
    spec, params = load(folder, device=run.device, dtype=run.pick(torch.bfloat16, torch.float32), mtp=True)
    model = Model(spec, params, cache_layouts(spec, run.pick("fp8", "fp32")))
    ids = list(held_out_text().encode())
    for batch in run.pick(REQUESTS, (1,)):
        prompts = [ids[37 * row : 37 * row + length] for row in range(batch)]
        options = dict(max_new_tokens=new, graph=not run.dry, prefill_tokens=4096)
        for invariant in (False, True) if batch > 1 else (False,):
            runs = [
                [
                    generate(model, prompts, speculate=drafts, batch_invariant=invariant, **options)
                    for _ in range(run.pick(2 if batch == 1 else 1, 1))
                ]
                for drafts in (0, DRAFTS)
            ]
            found = [min(each, key=lambda one: one.decode_s) for each in runs]
            slow, fast = (1e6 * one.decode_s / sum(len(row) - 1 for row in one.tokens) * batch for one in found)
            pairs = [a == b for mine, own in zip(*(one.tokens for one in found)) for a, b in zip(mine, own)]
            title = f"{name}, {batch} requests, {found[1].accepted_per_step:.2f} tokens a step"
            if invariant:
                title += ", batch_invariant"
            yield Record(f"{title}, {100 * sum(pairs) / len(pairs):.1f}% equal", fast, "no drafts", slow)
