"""Stages, steps, and what is kept between two runs of the script."""

from __future__ import annotations

import contextlib
import functools
import json
import math
import time
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from sparse_attn.checkpoints.save import save
from sparse_attn.framework import streams
from sparse_attn.models.params import INTEGER_NAMES, param_dtype
from sparse_attn.spec import CompressedSpec, Spec
from training import latent, windowed
from training.batches import Batch, Source
from training.measure import measure
from training.recipe import Stage, first_weights, is_index

METRICS = ("text", "text_count", "answer", "answer_count", "answer_right", "index", "steps")
SAVE_EVERY = 60.0  # seconds
WARM_STEPS = 3  # eager ones before a step is captured


class Settings(NamedTuple):
    """learning_rate: the highest. retrieval_share: of the rows of a batch. answer_weight: of the answers' mean loss
    beside the text's. index_rows: positions a batch compares the indexers at. balance: what a step moves an expert's
    bias by."""

    model: str
    stages: list[Stage]
    tokens: int
    learning_rate: float
    retrieval_share: float
    answer_weight: float
    index_rows: int
    weight_decay: float
    balance: float
    seed: int


class Trainer:
    """Weights in fp32, and what moves them."""

    def __init__(
        self,
        spec: Spec | CompressedSpec,
        settings: Settings,
        source: Source,
        *,
        bf16: bool,
        graph: bool,
        fuse: bool,
        start: dict[str, torch.Tensor] | None = None,
    ):
        """start: weights to start from, as checkpoints.load gives them; None: random ones."""
        self.spec, self.settings, self.source = spec, settings, source
        self.device, self.graph = source.device, graph
        self.dtype = torch.bfloat16 if bf16 else torch.float32
        self.weights = first_weights(spec, settings.seed, self.device)
        for name, value in (start or {}).items():
            if not name.startswith("rope"):
                self.weights[name].copy_(value)
        self.forward = self.plain = windowed.forward if isinstance(spec, CompressedSpec) else latent.forward
        if fuse and self.plain is windowed.forward:
            self.forward = functools.partial(windowed.forward, ops=windowed.fused_stream_ops())
        self.fixed = [n for n in self.weights if n.endswith((*INTEGER_NAMES, "moe.bias")) or n.startswith("rope")]
        self.names = [name for name in self.weights if name not in self.fixed]
        self.optimiser = self._optimiser()
        self.metrics = torch.zeros(len(METRICS), dtype=torch.float32, device=self.device)
        self.done = 0
        self._prepared: tuple[Stage, Batch, torch.Tensor] | None = None
        self._replay: torch.cuda.CUDAGraph | None = None
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None

    def beside(self) -> contextlib.AbstractContextManager:
        """The stream that all steps are to run on: one that can be captured."""
        return torch.cuda.stream(self._stream) if self._stream else contextlib.nullcontext()

    def _optimiser(self) -> torch.optim.AdamW:
        plain = [n for n in self.names if self.weights[n].dim() < 2 or n == "embed" or n.endswith("position_bias")]
        matrices = [n for n in self.names if n not in plain]
        on_gpu = self.device.type == "cuda"
        rate = torch.tensor(0.0, dtype=torch.float32, device=self.device) if on_gpu else 0.0
        groups = [
            {"params": [self.weights[n] for n in names], "weight_decay": decay, "lr": rate.clone() if on_gpu else rate}
            for names, decay in ((matrices, self.settings.weight_decay), (plain, 0.0))
        ]
        return torch.optim.AdamW(groups, betas=(0.9, 0.98), eps=1e-8, fused=on_gpu or None, capturable=on_gpu)

    @property
    def total(self) -> int:
        return sum(stage.steps for stage in self.settings.stages)

    def stage(self) -> tuple[int, Stage, int]:
        """(number, stage, steps of it that are done) of the next step."""
        before = 0
        for number, stage in enumerate(self.settings.stages):
            if self.done < before + stage.steps:
                return number, stage, self.done - before
            before += stage.steps
        raise IndexError("every stage is done")

    def rate(self, stage: Stage, within: int) -> float:
        """The learning rate: a short rise at every stage's start, a cosine to a twentieth over what trains the model;
        the indexers' warm-up keeps the highest."""
        highest = self.settings.learning_rate
        rise = min(1.0, (within + 1) / max(1, min(200, stage.steps // 5)))
        if stage.kind == "warmup":
            return highest * rise
        return highest * rise * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * self.done / self.total)))

    def step(self) -> None:
        """One step of the stage that is due."""
        _, stage, within = self.stage()
        drawn = self._draw(stage)
        if self._prepared is None or self._prepared[0] != stage:
            self._prepare(stage, drawn)
        for group in self.optimiser.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(self.rate(stage, within))
            else:
                group["lr"] = self.rate(stage, within)
        _, batch, rows = self._prepared
        for old, new in zip((*batch, rows), drawn):
            old.copy_(new)
        if self.graph and self._replay is None and within >= WARM_STEPS:
            self._replay = self._captured(stage, batch, rows)
        if self._replay is not None:
            self._replay.replay()
        else:
            self._update(stage, batch, rows)
        self.done += 1

    def _draw(self, stage: Stage) -> tuple[torch.Tensor, ...]:
        count = max(1, self.settings.tokens // stage.length)
        batch = self.source.batch(count, stage.length, self.settings.retrieval_share)
        order = torch.rand(
            stage.length, generator=self.source.generator, dtype=torch.float32, device=self.device
        ).argsort()
        return *batch, order[: min(self.settings.index_rows, stage.length)]

    def _prepare(self, stage: Stage, drawn: tuple[torch.Tensor, ...]) -> None:
        """Let what the stage trains require gradients; the batches that follow are copied over ``drawn``."""
        self._replay = None
        *batch, rows = drawn
        for name in self.names:
            weight = self.weights[name]
            weight.requires_grad_(stage.kind == "sparse" or is_index(name) == (stage.kind == "warmup"))
            weight.grad = None
        self._prepared = stage, Batch(*batch), rows

    def _captured(self, stage: Stage, batch: Batch, rows: torch.Tensor) -> torch.cuda.CUDAGraph | None:
        """The step as a CUDA graph; None, with a word why, where it cannot be captured."""
        torch.cuda.synchronize(self.device)
        for name in self.names:
            self.weights[name].grad = None
        graph = torch.cuda.CUDAGraph()
        try:
            with streams.garbage_kept(), torch.cuda.graph(graph, stream=self._stream):
                self._update(stage, batch, rows)
        except RuntimeError as error:
            print(f"capture failed, steps run one kernel after the other: {error}", flush=True)
            self.graph = False
            torch.cuda.synchronize(self.device)
            return None
        return graph

    def _update(self, stage: Stage, batch: Batch, rows: torch.Tensor) -> None:
        used = {n: v if n.startswith("rope") else v.to(param_dtype(n, self.dtype)) for n, v in self.weights.items()}
        out = self.forward(
            used, self.spec, batch.tokens[:, :-1], sparse=stage.kind == "sparse",
            index_rows=None if stage.kind == "dense" else rows,
        )  # fmt: skip
        zero = torch.zeros((), dtype=torch.float32, device=self.device)
        index = torch.stack(out.trace.index_loss).sum() if out.trace.index_loss else zero
        loss = index
        targets = batch.tokens[:, 1:]
        nll = F.cross_entropy(out.logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
        text, answer = (nll * batch.text).sum(), (nll * batch.answer).sum()
        counts = batch.text.sum(), batch.answer.sum()
        if stage.kind != "warmup":
            loss = loss + text / counts[0].clamp_min(1) + self.settings.answer_weight * answer / counts[1].clamp_min(1)
        loss.backward()
        for of_index in (False, True):
            some = [self.weights[n] for n in self.names if is_index(n) == of_index and self.weights[n].grad is not None]
            if some:
                torch.nn.utils.clip_grad_norm_(some, 1.0, foreach=True)
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        with torch.no_grad():
            right = ((out.logits.argmax(-1) == targets) * batch.answer).sum()
            one = torch.ones_like(zero)
            self.metrics += torch.stack([text, counts[0], answer, counts[1], right, index, one]).detach()
            if stage.kind != "warmup":
                for name, load in out.trace.loads.items():
                    self.weights[name] += self.settings.balance * torch.sign(load.mean() - load)

    def report(self) -> dict[str, float]:
        """Means since the last report, for which the device is waited for."""
        found = dict(zip(METRICS, self.metrics.tolist()))
        self.metrics.zero_()
        return {
            "bits_per_byte": found["text"] / max(found["text_count"], 1) / math.log(2),
            "answer_bits": found["answer"] / max(found["answer_count"], 1) / math.log(2),
            "answers_right": found["answer_right"] / max(found["answer_count"], 1),
            "index_loss": found["index"] / max(found["steps"], 1),
        }

    def rounded(self, dtype: torch.dtype = torch.bfloat16) -> dict[str, torch.Tensor]:
        """The weights as they are shipped."""
        return {
            n: v.detach() if n.startswith("rope") else v.detach().to(param_dtype(n, dtype))
            for n, v in self.weights.items()
        }

    def measured(self, length: int, documents: int = 32) -> dict[str, dict[str, float]]:
        """What the weights are worth, see measure."""
        weights = self.rounded(self.dtype)

        def forward(ids: torch.Tensor, sparse: bool) -> torch.Tensor:
            return self.plain(weights, self.spec, ids, sparse=sparse).logits

        return measure(forward, self.device, length, documents)

    def state(self) -> dict:
        weights = {name: value.detach() for name, value in self.weights.items() if not name.startswith("rope")}
        return {"settings": _plain(self.settings), "done": self.done, "weights": weights,
                "optimiser": self.optimiser.state_dict(), "generator": self.source.generator.get_state()}  # fmt: skip

    def resume(self, state: dict) -> None:
        """Go on from a state() of the same settings; ValueError for one of others."""
        if state["settings"] != _plain(self.settings):
            raise ValueError("state: it stems from other settings; give those, or --fresh to start over")
        with torch.no_grad():
            for name, value in state["weights"].items():
                self.weights[name].copy_(value)
        self.optimiser.load_state_dict(state["optimiser"])
        self.source.generator.set_state(state["generator"].cpu())
        self.done = state["done"]


def _plain(settings: Settings) -> dict:
    return json.loads(json.dumps(settings._asdict()))


def train(trainer: Trainer, folder: Path, deadline: float, report_every: int) -> bool:
    """Run what is left; whether all of it was done before ``deadline`` (of time.monotonic)."""
    state_file, log = folder / "state.pt", folder / "log.jsonl"
    saved = started = time.monotonic()
    first, at_report, since = trainer.done, trainer.done, started
    while trainer.done < trainer.total:
        number, stage, within = trainer.stage()
        if time.monotonic() > deadline:
            _save_state(trainer, state_file)
            print(
                f"out of time after {trainer.done} of {trainer.total} steps; the same command goes on from here",
                flush=True,
            )
            return False
        trainer.step()
        last = within + 1 == stage.steps
        if last or trainer.done % report_every == 0:
            found = trainer.report()
            now = time.monotonic()
            pace = (now - since) / max(1, trainer.done - at_report)
            at_report, since = trainer.done, now
            record = {"step": trainer.done, "stage": number, "kind": stage.kind, "length": stage.length,
                      "seconds": now - started, "ms_per_step": 1e3 * pace} | found  # fmt: skip
            if last:
                record |= trainer.measured(stage.length)
                since = time.monotonic()
            _note(log, record)
            print(_line(record, trainer.total, started, first), flush=True)
            if not math.isfinite(found["bits_per_byte"] + found["index_loss"]):
                raise RuntimeError("the loss is not finite; try a lower --learning-rate")
        if time.monotonic() - saved > SAVE_EVERY:
            _save_state(trainer, state_file)
            saved = time.monotonic()
    _save_state(trainer, state_file)
    return True


def finish(trainer: Trainer, folder: Path, facts: dict) -> dict:
    """Write the checkpoint and what it is worth; returns that."""
    size = save(folder, trainer.spec, trainer.rounded(torch.float32), torch.bfloat16)
    weights = sum(v.numel() for n, v in trainer.weights.items() if not n.startswith("rope"))
    result = (
        facts | {"weights": weights, "bytes": size} | trainer.measured(trainer.settings.stages[-1].length, documents=64)
    )
    (folder / "training.json").write_text(json.dumps(result | {"settings": _plain(trainer.settings)}, indent=2) + "\n")
    return result


def _save_state(trainer: Trainer, path: Path) -> None:
    partial = path.with_suffix(".part")
    torch.save(trainer.state(), partial)
    partial.replace(path)


def _note(log: Path, record: dict) -> None:
    with log.open("a") as file:
        file.write(json.dumps(record) + "\n")


def _line(record: dict, total: int, started: float, first: int) -> str:
    spent = time.monotonic() - started
    left = spent / max(1, record["step"] - first) * (total - record["step"])
    parts = [
        f"{record['kind']:>6} {record['length']:>4}  step {record['step']:>5}/{total}"
        f"  {spent:6.1f} s, about {left:5.1f} s left  {record['ms_per_step']:6.1f} ms"
        f"  {record['bits_per_byte']:.3f} bits/byte  answers {record['answer_bits']:.3f} bits"
        f" {100 * record['answers_right']:5.1f}%  index {record['index_loss']:.3f}"
    ]
    for way in ("dense", "sparse"):
        if way in record:
            found = record[way]
            bits, right = found["bits_per_byte"], 100 * found["retrieval"]
            parts.append(f"    held out, {way}: {bits:.4f} bits/byte, retrieval {right:.2f}%")
    return "\n".join(parts)
