"""Train a small byte-level model that ships with the package: python scripts/train_tiny.py v32 --out out/reader_v32

By the recipe of DeepSeek Sparse Attention: dense training on growing contexts, the indexers alone against the dense
attention, then everything by what the indexers select. One GPU, some minutes; a run that is out of time (--minutes)
goes on where it stopped when the same command is given again. A CPU works too, at toy sizes.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parent.parent)]

import numpy as np  # noqa: E402
import safetensors.torch  # noqa: E402, F401  (wanted at the end: better missed at the start)
import torch  # noqa: E402
from training import text  # noqa: E402
from training.batches import Source  # noqa: E402
from training.loop import Settings, Trainer, finish, train  # noqa: E402
from training.predicting import Settings as Predicting  # noqa: E402
from training.predicting import train_prediction  # noqa: E402
from training.recipe import MODELS, TOP_K, stages  # noqa: E402

from sparse_attn.checkpoints.load import load  # noqa: E402
from sparse_attn.cli.shipped import folder_of  # noqa: E402
from sparse_attn.framework.torch_private import run_what_does_not_compile  # noqa: E402

OUT_OF_TIME = 3


def main(arguments: list[str] | None = None) -> int:
    options = _parser().parse_args(arguments)
    deadline = time.monotonic() + 60 * options.minutes
    torch.manual_seed(options.seed)
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    on_gpu = device.type == "cuda"
    torch.set_float32_matmul_precision("high")
    run_what_does_not_compile()
    options.out.mkdir(parents=True, exist_ok=True)
    corpus = _corpus(options.corpus or options.out / "corpus.npz")
    print(
        f"{len(corpus.prose):,} bytes of prose, {len(corpus.code):,} of code, from Python {platform.python_version()}",
        flush=True,
    )

    if options.mtp:
        spec, params = load(
            options.start or folder_of(f"reader-{options.model}"), device=device, dtype=torch.float32, expand=True
        )
        settings = Predicting(options.mtp, options.rows, options.length, options.learning_rate, options.retrieval_share)
        train_prediction(
            params, spec, Source(corpus, device, options.seed), settings, options.out, deadline,
            seed=options.seed, report_every=options.report_every,
        )  # fmt: skip
        return 0
    spec = MODELS[options.model](options.top_k or TOP_K[options.model])
    if options.hidden:
        spec = replace(spec, hidden_size=options.hidden)
    if spec.index.top_k > options.length // 8:
        print(f"top-k {spec.index.top_k} is more than an eighth of the context of {options.length}", flush=True)
    settings = Settings(
        options.model, stages(options.length, options.dense, options.warmup, options.sparse), options.tokens,
        options.learning_rate, options.retrieval_share, options.answer_weight, options.index_rows, options.weight_decay,
        options.balance, options.seed,
    )  # fmt: skip
    trainer = Trainer(
        spec, settings, Source(corpus, device, options.seed), bf16=options.bf16 if options.bf16 is not None else on_gpu,
        graph=on_gpu and options.graph, fuse=on_gpu and options.compile,
        start=load(options.start, device=device, dtype=torch.float32, expand=True)[1] if options.start else None,
    )  # fmt: skip
    count = sum(trainer.weights[name].numel() for name in trainer.names)
    print(f"{spec.name}: {count:,} weights; {trainer.total} steps of {settings.tokens} tokens on {device}", flush=True)
    state = options.out / "state.pt"
    if state.exists() and not options.fresh:
        trainer.resume(torch.load(state, map_location=device, weights_only=True))
        print(f"going on after step {trainer.done}", flush=True)
    facts = {
        "model": spec.name, "torch": torch.__version__, "python": platform.python_version(),
        "device": torch.cuda.get_device_name(device) if on_gpu else "cpu",
    }  # fmt: skip
    with trainer.beside():
        if not train(trainer, options.out, deadline, options.report_every):
            return OUT_OF_TIME
        result = finish(trainer, options.out, facts)
    print(f"{options.out}: {result['weights']:,} weights in {result['bytes']:,} bytes")
    for way in ("dense", "sparse"):
        bits, right = result[way]["bits_per_byte"], 100 * result[way]["retrieval"]
        print(f"held out, {way}: {bits:.4f} bits/byte, retrieval {right:.2f}%")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("model", choices=tuple(MODELS))
    add("--out", type=Path, required=True, metavar="DIR", help="where the checkpoint, the log and the state go")
    add("--minutes", type=float, default=9.0, help="stop in time, keep the state (default: %(default)s)")
    add(
        "--start",
        type=Path,
        metavar="DIR",
        help="a checkpoint to start from, of the same sizes; default: random weights",
    )
    add("--fresh", action="store_true", help="start over where a state is found")
    add("--device", help="default: cuda where there is one")
    add("--graph", action=argparse.BooleanOptionalAction, default=True, help="replay steps as CUDA graphs")
    add("--compile", action=argparse.BooleanOptionalAction, default=True, help="fuse what mixes V4's streams, on a GPU")
    add("--bf16", action=argparse.BooleanOptionalAction, default=None, help="default: on a GPU")
    add(
        "--corpus",
        type=Path,
        metavar="FILE",
        help="text collected before (default: DIR/corpus.npz, made where missing)",
    )
    add("--mtp", type=int, default=0, metavar="STEPS",
        help="train a layer of multi-token prediction alone, behind the weights of --start (default: the reader that "
        "ships), for at most STEPS steps or --minutes")  # fmt: skip
    add("--rows", type=int, default=16, help="of a step of --mtp (default: %(default)s)")
    add("--length", type=int, default=1024, help="longest context (default: %(default)s)")
    add("--top-k", type=int, help="keys the indexers select (default: 128 of tokens, 32 of entries)")
    add("--hidden", type=int, help="hidden size, for toys")
    add("--dense", type=int, default=6000, help="dense steps (default: %(default)s)")
    add("--warmup", type=int, default=500, help="steps of the indexers alone (default: %(default)s)")
    add("--sparse", type=int, default=2500, help="sparse steps (default: %(default)s)")
    add("--tokens", type=int, default=32768, help="of a step (default: %(default)s)")
    add("--learning-rate", type=float, default=2e-3, help="the highest (default: %(default)s)")
    add("--retrieval-share", type=float, default=0.6, help="rows with keys and values (default: %(default)s)")
    add(
        "--answer-weight", type=float, default=1.0, help="of the answers' loss beside the text's (default: %(default)s)"
    )
    add("--index-rows", type=int, default=128, help="positions the indexers are compared at (default: %(default)s)")
    add("--weight-decay", type=float, default=0.05, help="default: %(default)s")
    add("--balance", type=float, default=1e-3, help="what a step moves an expert's bias by (default: %(default)s)")
    add("--seed", type=int, default=0, help="default: %(default)s")
    add("--report-every", type=int, default=100, metavar="STEPS", help="default: %(default)s")
    return parser


def _corpus(path: Path) -> text.Corpus:
    if not path.exists():
        corpus = text.collect()
        np.savez(path, prose=corpus.prose, code=corpus.code)
        return corpus
    with np.load(path) as stored:
        return text.Corpus(stored["prose"], stored["code"])


if __name__ == "__main__":
    sys.exit(main())
