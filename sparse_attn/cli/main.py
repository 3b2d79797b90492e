"""The command line: generate from a text, describe the machine, plan memory, measure a checkpoint."""

from __future__ import annotations

import argparse
import contextlib
import io
import signal
import sys
import threading
from collections.abc import Iterator, Sequence

from sparse_attn.checkpoints.formats import form_of, form_said_by, predicted_of
from sparse_attn.checkpoints.load import check_predicts, predicted_layers, read_config
from sparse_attn.checkpoints.quantisation import quantisation_of
from sparse_attn.cli import (
    chat,
    explain,
    jsonl,
    output,
    plan_report,
    plot,
    quality_report,
    report,
    sources,
    torchrun,
    write_checkpoint,
)
from sparse_attn.cli.arguments import (
    DTYPES,
    Parser,
    check_outputs,
    check_prefill_activations,
    device_of,
    write_json,
)
from sparse_attn.cli.bars import byte_bar, step_bars
from sparse_attn.cli.documents import Question, question
from sparse_attn.cli.options import add_generate, add_plan
from sparse_attn.cli.plan import plan
from sparse_attn.cli.shipped import folder_of, shipped_models
from sparse_attn.files import read_text, write_output
from sparse_attn.framework.compilation import Compilation
from sparse_attn.framework.target import CPU, H200, resolve_impl, target_of
from sparse_attn.framework.torch_private import dynamo_counts
from sparse_attn.generation import processes, text
from sparse_attn.generation.generate import generate
from sparse_attn.generation.graph import check_capturable
from sparse_attn.generation.model import Model
from sparse_attn.generation.sampling import Sampling
from sparse_attn.generation.selections import Watch
from sparse_attn.mesh import ONE_RANK, Mesh, show_mesh
from sparse_attn.mxfp4 import GROUP, MXFP4
from sparse_attn.pipeline import Bounds, cache_layouts, default_block_size
from sparse_attn.spec import CompressedSpec, Spec
from sparse_attn.version import __version__
from sparse_attn.weight_layout import weight_bytes

EXIT_INTERRUPTED = 130  # the exit code behind Ctrl-C, and here behind SIGTERM


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit code. Bad arguments, and whatever they name, end it with code 2 and one line. Ctrl-C
    and SIGTERM end it with code 130."""
    parser, arguments = build_parser(), sys.argv[1:] if arguments is None else arguments
    try:
        with contextlib.redirect_stderr(io.StringIO()) if torchrun.rank() else contextlib.nullcontext():
            options = parser.parse_args(arguments, argparse.Namespace(arguments=arguments))
        with _interruptible():
            code = options.run(options)
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        if not torchrun.rank():
            print(f"{parser.prog}: interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (ValueError, TypeError, ImportError, OSError) as error:
        torchrun.say_error(parser.prog, error)
        return 2


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Inside, SIGTERM raises KeyboardInterrupt, as Ctrl-C does. Not in one of several processes: torchrun ends those
    that wait for a lost one with it, and they would go on waiting."""
    main_thread = threading.current_thread() is threading.main_thread()  # which alone may set what a signal does
    if not main_thread or torchrun.world_size() > 1:
        yield
        return
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before or signal.SIG_DFL)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m sparse_attn", description=__doc__)
    parser.add_argument("--version", action="version", version=f"sparse_attn {__version__}")
    commands = parser.add_subparsers(
        title="commands", required=True, metavar="{generate,info,plan,quality,explain,write-checkpoint}"
    )
    generating = commands.add_parser("generate", help="continue a text", description="Continue a text.")
    add_generate(generating)
    generating.set_defaults(run=run_generate)
    shown = commands.add_parser("info", help="the machine, and which implementation each operator takes")
    shown.epilog = "example: info --short"
    shown.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    shown.add_argument("--short", action="store_true", help="the machine alone")
    shown.set_defaults(run=run_info)
    planning = commands.add_parser("plan", help="bytes of weights, caches, workspace and activations at given bounds")
    add_plan(planning)
    planning.set_defaults(run=run_plan)
    quality_report.add(commands.add_parser("quality", help="what a checkpoint is worth, path by path"))
    explain.add(commands.add_parser("explain", help="which kernel a call takes on a GPU, and why"))
    write_checkpoint.add(commands.add_parser("write-checkpoint", help="random weights in a form that is published"))
    return parser


def run_generate(options: argparse.Namespace) -> int:
    if (data := options.data_parallel or 1) > 1 and not options.prompts:
        raise ValueError(f"--data-parallel: got {data} with one prompt, allowed: with --prompts")
    with torchrun.joined(options) as mesh, contextlib.ExitStack() as stack:
        return _generate(options, mesh, stack)


def _generate(options: argparse.Namespace, mesh: Mesh, stack: contextlib.ExitStack) -> int:
    device, leads = device_of(options.device), torchrun.rank() == 0
    options.progress = options.progress if leads else False
    resolve_impl(options.impl, device)
    check_outputs(options)
    jsonl.check_options(options)
    if options.plot and options.speculate:
        raise ValueError("--plot: got it with --speculate, allowed: steps of one token")
    if options.plot and (options.compile or options.graph):
        raise ValueError("--plot: got it with --compile or --graph, allowed: steps that run one operator at a time")
    save_logits = _logits_writer() if options.dump_logits else None
    source = sources.source_of(options)
    if mesh != ONE_RANK:
        processes.check_same_everywhere(**source.identity())
    spec, expand = source.spec, options.expand_weights
    if source.config and source.folder and options.speculate:
        check_predicts(source.config, f"--speculate: got {options.speculate}", source.folder)
    stop_ids = () if options.ignore_eos else source.stop_ids()
    check_prefill_activations(options, source.packs_experts(expand))
    dtype = DTYPES[options.dtype or ("bf16" if source.config and device.type == "cuda" else "fp32")]
    if options.graph:
        check_capturable(device, options.impl, spec, dtype, packed=source.packs_experts(expand), mesh=mesh)
    tokenizer = source.tokenizer()
    if options.stop and tokenizer is None:
        raise ValueError(f"--stop: got a text, allowed: none, {source.folder or spec.name} holds no tokenizer.json")
    prompt, asked = ([], None) if options.prompts else _prompt(options, source, tokenizer)
    if options.plot:
        output.check_plot(spec)
    index_cache = options.index_cache or _default_index_cache(source.config, spec, options.cache)
    sampling = _sampling(options, stop_ids)
    job = None
    if options.prompts:
        settings = dict(dtype=str(dtype), packed=source.packs_experts(expand), cache=options.cache,
                        index_cache=index_cache, prefill_activations=options.prefill_activations)  # fmt: skip
        job = stack.enter_context(jsonl.prepared(options, source, tokenizer, sampling, settings, device))
    live = leads and sys.stdout.isatty() and not options.progress
    answer = output.Answer(tokenizer, options.stop, live)
    told = output.Compiling(lambda: compilation.seconds) if leads else lambda what: None
    compilation = stack.enter_context(Compilation(dynamo=options.compile, triton=device.type == "cuda", told=told))
    before, watch, params, interrupted = dynamo_counts(), Watch() if options.plot else None, {}, False
    try:
        with byte_bar("weights", options.progress) as progress:
            params = source.weights(device, dtype, expand, progress, mesh, mtp=bool(options.speculate))
        layouts = cache_layouts(spec, options.cache, index_kind=index_cache)
        model = Model(
            spec, params, layouts, options.impl, batch_invariant=options.batch_invariant,
            prefill_activations=options.prefill_activations, mesh=mesh,
        )  # fmt: skip
        if job:
            return jsonl.run(options, model, tokenizer, job)
        if asked and leads:
            output.ask(asked)
        answer.begin(lambda: compilation.seconds)
        with watch or contextlib.nullcontext():
            result = generate(
                model,
                [prompt],
                max_new_tokens=options.max_new_tokens,
                sampling=sampling,
                block_size=options.block_size,
                prefill_tokens=options.prefill_tokens,
                keep_logits=save_logits is not None,
                logprobs=options.logprobs,
                on_token=answer.push,
                compile=options.compile,
                graph=options.graph,
                speculate=options.speculate,
                progress=step_bars(options.progress, without=("decode",) if live else ()),
            )
    except KeyboardInterrupt:
        if job:
            raise
        result, interrupted = answer.so_far(), True
    ended = answer.stop or (answer.tokens and answer.tokens[-1] in stop_ids)
    facts = {
        "model": source.name,
        "dtype": str(dtype).removeprefix("torch."),
        "cache": options.cache,
        "index_cache": index_cache,
        "prefill_activations": options.prefill_activations,
        "impl": resolve_impl(options.impl, device),
        "text": answer.text,
        "finish_reason": output.INTERRUPTED if interrupted else "stop" if ended else "length",
        "ranks": show_mesh(mesh),
        "rank_weight_bytes": sum(map(weight_bytes, params.values())),
    }
    if options.stop:
        facts["stop"] = answer.stop
    if result.logprobs is not None:
        facts["logprobs"] = report.logprobs_report(result.logprobs[0])
    written = report.generation_report(result, len(prompt), device, since=before, **facts)
    if not leads:
        return EXIT_INTERRUPTED if interrupted else 0
    answer.finish()
    if save_logits and result.logits is not None:
        write_output(options.dump_logits, save_logits({"logits": result.logits[0]}))
    if options.json:
        write_json(options.json, written)
    output.show(written, spec, asked)
    if watch:
        drawn = output.steps(spec, prompt, result.tokens[0], watch.selected, tokenizer, source.name, asked)
        plot.save(options.plot, plot.draw(drawn))
    if interrupted:
        return EXIT_INTERRUPTED
    return 0


def _default_index_cache(config: dict | None, spec: Spec | CompressedSpec, cache: str) -> str:
    """The kind of index keys where nobody asks for one. config: the checkpoint's config.json, if there is one."""
    if config is None or cache != "fp8" or not isinstance(spec, CompressedSpec) or spec.index.head_dim % GROUP:
        return cache
    return MXFP4 if quantisation_of(config).expert_dtype == "fp4" else cache


def _sampling(options: argparse.Namespace, stop_ids: tuple[int, ...]) -> Sampling:
    return Sampling(
        options.temperature, options.seed, stop_ids, options.top_k, options.top_p, options.min_p,
        options.repetition_penalty, options.presence_penalty, options.frequency_penalty,
    )  # fmt: skip


def run_info(options: argparse.Namespace) -> int:
    text.say(report.info(device_of(options.device), short=options.short))
    return 0


def run_plan(options: argparse.Namespace) -> int:
    check_outputs(options)
    config, spec = (None, options.spec) if options.spec else read_config(folder_of(options.model))
    form = options.format or ("published" if config is None else form_said_by(config, spec))
    check_prefill_activations(options, form != "bf16")
    predicted = predicted_of(form_of(spec, form)) if config is None else predicted_layers(config)
    if config and options.speculate:
        check_predicts(config, f"--speculate: got {options.speculate}", folder_of(options.model))
    length = spec.max_positions if options.max_model_len is None else options.max_model_len
    if length > spec.max_positions:
        raise ValueError(
            f"--max-model-len: got {length}, allowed: at most the {spec.max_positions} positions of {spec.name}"
        )
    bounds = Bounds(
        max_batch=options.max_batch,
        max_batched_tokens=options.max_batched_tokens,
        max_model_len=length,
        next_n=options.next_n,
        block_size=options.block_size or default_block_size(spec),
        kv_rows=options.kv_rows,
        logits_bytes=options.logits_bytes,
        dtype=DTYPES[options.dtype],
        prefill_activations=options.prefill_activations,
    )
    target = target_of(device_of(None))
    index_cache = options.index_cache or _default_index_cache(config, spec, options.cache)
    target = H200 if target == CPU else target
    meshes = torchrun.planned(options)
    numbers = plan(
        spec, bounds, target, options.cache, index_cache, form, predicted, meshes, speculate=options.speculate
    )  # fmt: skip
    plan_report.show(numbers)
    if options.json:
        write_json(options.json, numbers)
    return 0


def _prompt(
    options: argparse.Namespace, source: sources.Source, tokenizer: text.Tokenizer | None
) -> tuple[list[int], Question | None]:
    """(ids, what they ask for where that is known)."""
    if options.prompt_ids is not None:
        return options.prompt_ids, None
    if options.chat is not None and source.folder not in shipped_models().values():
        return chat.chat_ids(options.chat, source.folder, source.spec), None
    if tokenizer is None:
        if source.folder is None and options.prompt is None and options.prompt_file is None:
            return sources.random_prompt(), None
        raise ValueError(
            f"--model: {source.folder or source.name} holds no tokenizer.json; give the prompt as --prompt-ids"
        )
    asked = None
    if options.chat is not None:
        given, asked = chat.as_text(options.chat)
    elif options.prompt is not None:
        given = options.prompt
    elif options.prompt_file is not None:
        given = read_text(options.prompt_file)
    elif source.folder in shipped_models().values():
        asked = question()
        given = asked.text
    else:
        given = text.shipped_text()
    text.check_text("--prompt", given)
    ids = tokenizer.encode(given)
    if not ids:
        raise ValueError("--prompt: got an empty text, allowed: at least one token")
    return ids, asked


def _logits_writer():
    try:
        from safetensors.torch import save
    except ImportError as error:
        raise ImportError("--dump-logits needs safetensors: pip install 'sparse_attn[models]'") from error
    return save
