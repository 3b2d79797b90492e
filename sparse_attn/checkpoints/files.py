"""Which files of a folder belong to its checkpoint, as transformers has it: model.safetensors, else the shards of an
index. Other .safetensors files in the folder do not belong to it."""

from __future__ import annotations

import hashlib
import json
import os
import re
from pathlib import Path, PurePosixPath
from typing import Any

from sparse_attn.files import check_regular, read_json_object
from sparse_attn.spec.fields import short

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
SAMPLE = 256
_POINTER = b"version https://git-lfs.github.com/spec/"
_HUB_ID = re.compile(r"(?:https?:/+(?:www\.)?(?:huggingface\.co|hf\.co)/|hf:/+)?([\w.-]+/[\w.-]+)/?")
_PICKLE = ("a pickle of torch", "save its state dict by safetensors.torch.save_file")
# Weights in other formats, by what their files end in, and what to do.
_FOREIGN = {
    ".gguf": ("GGUF", "download the safetensors that it was made of (hf download NAME --local-dir DIR)"),
    ".bin": _PICKLE, ".pt": _PICKLE, ".pth": _PICKLE,
}  # fmt: skip


def tensors_of(folder: Path) -> dict[str, tuple[Any, Path]]:
    """(open file, its path) of every tensor of the checkpoint in ``folder``, by its name in the files."""
    if (folder / WEIGHTS).exists():
        path = folder / WEIGHTS
        handle = open_tensors(path)
        return dict.fromkeys(handle.keys(), (handle, path))
    if not (folder / INDEX).exists():
        raise ValueError(f"checkpoint: {folder} holds no {WEIGHTS} and no {INDEX}{_others(folder)}")
    home = weight_map(folder / INDEX)
    handles = {}
    for name in sorted(set(home.values())):
        if not (folder / name).exists():
            raise ValueError(f"checkpoint: {INDEX} names {name}, which {folder} does not hold")
        handle = open_tensors(folder / name)
        handles[name] = handle, folder / name, set(handle.keys())
    for tensor, name in home.items():
        if tensor not in handles[name][2]:
            raise ValueError(f"weight {tensor}: missing in {name}, where {folder / INDEX} says it is")
    return {tensor: handles[name][:2] for tensor, name in home.items()}


def weight_map(index: Path) -> dict[str, str]:
    """The file of every tensor by ``index``. ValueError for a name that is not a file in its folder."""
    home = read_json_object(index).get("weight_map")
    if not isinstance(home, dict) or not home:
        raise ValueError(f"{index}: weight_map: got {short(home)}, allowed: tensors and the files they are in")
    for tensor, name in home.items():
        if not isinstance(name, str) or not _stays(name):
            raise ValueError(
                f"{index}: weight_map {tensor}: got {short(name)}, allowed: a .safetensors file in this folder"
            )
    return home


def open_tensors(path: Path) -> Any:
    """The safetensors file at ``path``. Only its header is read. ValueError where it is no such file."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError("reading a checkpoint needs safetensors: pip install 'sparse_attn[models]'") from error
    check_regular(path)
    with open(path, "rb") as file:  # for errors that name the file, which those of safe_open do not
        start = file.read(len(_POINTER))
    if start == _POINTER:
        raise ValueError(f"{path}: a Git LFS pointer, not the weights it stands for; git lfs pull fetches them")
    if not start:
        raise ValueError(f"{path}: an empty file, allowed: safetensors")
    try:
        return safe_open(str(path), framework="pt", device="cpu")
    except (SafetensorError, OSError, RuntimeError) as error:
        raise ValueError(f"{path}: damaged or no safetensors: {error}") from error


def offsets_of(path: Path) -> dict[str, int]:
    """The first byte of every tensor in a safetensors file that open_tensors has opened."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
    return {name: 8 + length + said["data_offsets"][0] for name, said in header.items() if name != "__metadata__"}


def sample_of(folder: Path) -> str:
    """A hash of what the weights in ``folder`` are: of every tensor its name, dtype, shape and SAMPLE bytes from its
    middle. The same tensors in other files have the same."""
    found = []
    for path in sorted({path for _, path in tensors_of(folder).values()}):
        with open(path, "rb") as file:
            length = int.from_bytes(file.read(8), "little")
            for name, said in json.loads(file.read(length)).items():
                if name != "__metadata__":
                    first, end = said["data_offsets"]
                    file.seek(8 + length + max(first, (first + end - SAMPLE) // 2))
                    part = hashlib.sha256(file.read(min(SAMPLE, end - first))).hexdigest()
                    found.append((name, said["dtype"], said["shape"], part))
    return hashlib.sha256(repr(sorted(found)).encode()).hexdigest()


def stale_files(folder: Path) -> list[Path]:
    """Files of an older checkpoint in ``folder`` that a model.safetensors replaces: its index, then its shards."""
    index = folder / INDEX
    if not os.path.lexists(index):
        return []
    try:
        shards = sorted(set(weight_map(index).values()) - {WEIGHTS})
    except (OSError, ValueError):  # no index that can be read: it goes, and nothing is known to belong to it
        shards = []
    return [index, *(folder / name for name in shards)]


def _stays(name: str) -> bool:
    """Whether a path, taken from a folder, stays in it; links are the folder's own affair."""
    path = PurePosixPath(name.replace("\\", "/"))
    return path.suffix == ".safetensors" and not path.is_absolute() and ".." not in path.parts and ":" not in name


def no_checkpoint(given: Path) -> str:
    """What ``given`` is in place of a checkpoint folder, and what to do: a clause that ends an error; may be empty."""
    hub = _HUB_ID.fullmatch(str(given))
    if not given.exists():
        return f"; as an id of the Hugging Face Hub: hf download {hub[1]} --local-dir DIR, then DIR" if hub else ""
    files = [given] if given.is_file() else sorted(given.iterdir())
    for path in files:
        for suffix, (kind, instead) in _FOREIGN.items():
            if path.suffix == suffix:
                return f"; {path.name} is {kind}, which is not read: {instead}"
    return "; it is a file, allowed: its folder" if given.is_file() else ""


def _others(folder: Path) -> str:
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    return f"; {found[0]} alone says not what it is part of" if found else no_checkpoint(folder)
