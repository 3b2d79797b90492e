"""The model that `generate` runs: a checkpoint folder, or a preset with random weights."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sparse_attn.checkpoints.files import sample_of
from sparse_attn.checkpoints.formats import FORMS, first_layers, form_of, form_said_by, said_of
from sparse_attn.checkpoints.load import load, read_config
from sparse_attn.checkpoints.memory import weight_bytes
from sparse_attn.checkpoints.random_packed import random_packed_params
from sparse_attn.checkpoints.sharding import check_mesh, shard_params
from sparse_attn.cli.arguments import Group, positive, spec_of_preset
from sparse_attn.cli.shipped import BYTE_VOCABULARY, folder_of, shipped_models, tokenizer_of
from sparse_attn.files import read_json_object
from sparse_attn.generation import text
from sparse_attn.mesh import ONE_RANK, Mesh
from sparse_attn.models.params import hold, random_params
from sparse_attn.spec import PRESETS, CompressedSpec, Spec
from sparse_attn.weight_layout import Weight

WEIGHTS_SEED = 0
RANDOM_PROMPT = 32  # tokens, of a preset without a tokenizer
DEFAULT_FORM = "published"


class Source(NamedTuple):
    """What is known of a model before its weights are there. config: its config.json, or what one would say of random
    weights in a published form; None of plain random weights. form: of checkpoints.formats, of random packed
    weights."""

    spec: Spec | CompressedSpec
    config: dict[str, Any] | None
    folder: Path | None = None
    form: str | None = None

    @property
    def name(self) -> str:
        return self.folder.name if self.folder else self.spec.name

    def packs_experts(self, expand: bool) -> bool:
        """Whether routed experts stay packed. expand: --expand-weights."""
        return not expand and self.config is not None and form_said_by(self.config, self.spec) != "bf16"

    def weights(
        self, device: torch.device, dtype: torch.dtype, expand: bool, progress: Callable[[int, int], object],
        mesh: Mesh = ONE_RANK, *, mtp: bool = False,
    ) -> dict[str, Weight]:  # fmt: skip
        """This process's part of the weights. mtp: with the layer of multi-token prediction."""
        if self.folder:
            return load(self.folder, device=device, dtype=dtype, expand=expand, mtp=mtp, progress=progress, mesh=mesh)[
                1
            ]
        check_mesh(self.spec, mesh)
        _check_room(self.spec, dtype, self.form or "bf16", device, mesh)
        if self.form:
            return random_packed_params(self.spec, WEIGHTS_SEED, device, dtype, form=self.form, mesh=mesh, mtp=mtp)
        if mesh == ONE_RANK:
            return dict(random_params(self.spec, WEIGHTS_SEED, device, dtype, mtp=mtp))
        whole = random_params(self.spec, WEIGHTS_SEED, "cpu", dtype, mtp=mtp)
        return {name: _on(weight, device) for name, weight in shard_params(dict(whole), mesh).items()}

    def stop_ids(self) -> tuple[int, ...]:
        """The ids that end a text; ValueError names the file that says one which is no token."""
        for token in self.spec.eos_token_ids:
            if token >= self.spec.vocab_size:
                raise ValueError(
                    f"{self.folder and self.folder / 'config.json'}: config eos_token_id: got {token}, allowed: 0 to "
                    f"{self.spec.vocab_size - 1}, below vocab_size; --ignore-eos goes without"
                )
        return self.spec.eos_token_ids

    def identity(self) -> dict[str, str]:
        """What tells this model from others, by name; the same of a copy of the folder. Weights are sampled."""
        return identity_of(self.folder) if self.folder else {"--preset": repr((self.spec, WEIGHTS_SEED, self.form))}

    def tokenizer(self) -> text.Tokenizer | None:
        if self.folder:
            return tokenizer_of(self.folder, self.spec)
        return text.byte_tokenizer() if self.spec.vocab_size == BYTE_VOCABULARY else None


def add(parser: Group) -> None:
    model, shipped = parser.add_mutually_exclusive_group(), tuple(shipped_models())
    model.add_argument(
        "--model",
        metavar="NAME|DIR",
        help=f"a checkpoint folder, or a small model that ships here: {', '.join(shipped)} (default: {shipped[0]})",
    )
    model.add_argument("--preset", type=spec_of_preset, metavar="|".join(PRESETS), help="a model of random weights")
    parser.add_argument("--layers", type=positive, metavar="N", help="the first N of --preset (default: all)")
    parser.add_argument("--weights", choices=("random", "plain"),
                        help="of --preset. random: packed, of --format, drawn on the device. plain: not quantised, "
                        "drawn on the CPU, the same on every device (default: plain for tiny presets, else random)"
                        )  # fmt: skip
    parser.add_argument("--format", choices=FORMS, help="of --weights random, as write-checkpoint has it (default: "
                        f"{DEFAULT_FORM})")  # fmt: skip


def source_of(options: argparse.Namespace) -> Source:
    """What --model or --preset, --layers, --weights and --format name. ValueError where they do not go together."""
    if options.preset is None:
        for name in ("layers", "weights", "format"):
            if getattr(options, name) is not None:
                raise ValueError(f"--{name}: got it without --preset, allowed: with --preset")
        folder = folder_of(options.model or next(iter(shipped_models())))
        config, spec = read_config(folder)
        return Source(spec, config, folder)
    spec = options.preset if options.layers is None else first_layers(options.preset, options.layers)
    kind = options.weights or ("plain" if spec.name.startswith("tiny") and options.format is None else "random")
    if options.expand_weights:
        raise ValueError("--expand-weights: got it with --preset, allowed: with --model; --weights plain is expanded")
    if kind == "plain":
        if options.format is not None:
            raise ValueError("--format: got it with --weights plain, allowed: with --weights random")
        return Source(spec, None)
    form = options.format or DEFAULT_FORM
    return Source(spec, said_of(spec, form_of(spec, form), 0), form=form)


def identity_of(folder: Path) -> dict[str, str]:
    """Hashes of what a model's folder holds: its config, its tokenizer, and a sample of each of its weights."""
    config, tokenizer = read_json_object(folder / "config.json"), folder / "tokenizer.json"
    return {
        "config.json": hashlib.sha256(json.dumps(config, sort_keys=True).encode()).hexdigest(),
        "tokenizer.json": hashlib.sha256(tokenizer.read_bytes()).hexdigest() if tokenizer.exists() else "none",
        "weights": sample_of(folder),
    }


def random_prompt() -> list[int]:
    """Ids that are in every vocabulary."""
    return text.byte_tokenizer().encode(text.shipped_text())[:RANDOM_PROMPT]


def _on(weight: Weight, device: torch.device) -> Weight:
    assert isinstance(weight, torch.Tensor)
    return hold(weight.to(device))


def _check_room(spec: Spec | CompressedSpec, dtype: torch.dtype, form: str, device: torch.device, mesh: Mesh) -> None:
    """ValueError where the weights alone are more than the device has."""
    needed = sum(weight_bytes(spec, dtype, form, mesh=mesh).values())
    if device.type == "cuda":
        room = torch.cuda.mem_get_info(device)[0]
    else:
        room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > room:
        raise ValueError(
            f"--preset: got {needed:,} bytes of weights ({spec.num_layers} layers of {spec.name}) for {device}, which "
            f"has {room:,}, allowed: what fits, by fewer --layers"
        )
