"""A conversation as token ids of DeepSeek-V4, rendered and encoded by the package deepseek-recipe."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparse_attn.files import check_regular, read_json, read_text
from sparse_attn.spec import CompressedSpec, Spec
from sparse_attn.spec.fields import short

KEYS = ("messages", "tools", "tool_choice", "thinking", "reasoning_effort")  # what changes a prompt
MODEL = "DeepSeek-V4-Pro"  # the package's name for the prompts of DeepSeek-V4, Flash and Pro


def chat_ids(path: Path, folder: Path | None, spec: Spec | CompressedSpec) -> list[int]:
    """The ids of the conversation in ``path`` by the tokenizer.json of ``folder``.

    path: a JSON list of messages, or an object as a chat completion takes it, with KEYS alone. Thinking is on unless it
    says otherwise.

    ValueError names what is no conversation, and a model that is not DeepSeek-V4. ImportError names the extra.
    """
    if not isinstance(spec, CompressedSpec):
        raise ValueError(f"--chat: got {spec.name}, allowed: DeepSeek-V4, whose prompts deepseek-recipe renders")
    if folder is None or not (folder / "tokenizer.json").exists():
        raise ValueError(f"--chat: {folder or spec.name} holds no tokenizer.json, allowed: a model that has one")
    try:
        import deepseek_recipe as recipe
    except ImportError as error:
        raise ImportError("--chat needs deepseek-recipe: pip install 'sparse_attn[chat]'") from error
    request = conversation(path)
    check_regular(folder / "tokenizer.json")
    try:
        tokenizer = recipe.Tokenizer.from_str(read_text(folder / "tokenizer.json"))
    except (ValueError, RuntimeError) as error:
        raise ValueError(f"{folder / 'tokenizer.json'}: no tokenizer: {error}") from error
    try:
        converted = recipe.ChatCompletionRequest(request | {"model": MODEL}).convert(recipe.ConversionOptions())
        return list(recipe.DeepseekV4Encoding().with_tokenizer(tokenizer).encode(converted.conversation))
    except (ValueError, RuntimeError, recipe.ConversionError) as error:
        raise ValueError(f"{path}: {error}") from error


def conversation(path: Path) -> dict[str, Any]:
    """What ``path`` asks for, as an object with KEYS alone; texts are its only content."""
    found = read_json(path)
    request = {"messages": found} if isinstance(found, list) else found
    if not isinstance(request, dict) or not isinstance(request.get("messages"), list):
        raise ValueError(f"{path}: got {short(found)}, allowed: a list of messages, or an object that has one")
    if unknown := [key for key in request if key not in KEYS]:
        raise ValueError(f"{path}: {short(unknown[0])}: got it, allowed: {', '.join(KEYS)}")
    for number, message in enumerate(request["messages"]):
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else ():
            if not isinstance(part, Mapping) or part.get("type") != "text":
                raise ValueError(f"{path}: messages {number}: got {short(part)}, allowed: texts")
    return request
