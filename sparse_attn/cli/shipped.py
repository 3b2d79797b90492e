"""The trained models that ship with the package, and how a checkpoint folder's text becomes ids."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from sparse_attn.checkpoints.files import no_checkpoint
from sparse_attn.generation.text import Tokenizer, byte_tokenizer, file_tokenizer
from sparse_attn.spec import CompressedSpec, Spec

BYTE_VOCABULARY = 257  # bytes, and what ends a text


def shipped_models() -> dict[str, Path]:
    """Folders of the models that ship here, by name."""
    data = Path(str(resources.files("sparse_attn.data")))
    return {path.parent.name.replace("_", "-"): path.parent for path in sorted(data.glob("*/config.json"))}


def folder_of(given: str, option: str = "--model") -> Path:
    """The folder of a shipped model's name, or the folder itself; ValueError for neither, which ``option`` gave."""
    found = shipped_models()
    name = given.replace("_", "-")
    if name in found and not Path(given).is_dir():
        return found[name]
    if not (Path(given) / "config.json").exists():
        names = ", ".join(found) or "none"
        raise ValueError(
            f"{option}: got {given!r}, allowed: a folder with a config.json, or one that ships here ({names})"
            f"{no_checkpoint(Path(given))}"
        )
    return Path(given)


def tokenizer_of(folder: Path, spec: Spec | CompressedSpec) -> Tokenizer | None:
    """By tokenizer.json; bytes where there is none and the vocabulary is that of bytes; else None."""
    found = file_tokenizer(folder)
    return byte_tokenizer() if found is None and spec.vocab_size == BYTE_VOCABULARY else found
