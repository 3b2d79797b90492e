"""A conversation as token ids of DeepSeek-V4, rendered and encoded by the package deepseek-recipe; as text for models
that ship."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sparse_attn.cli.documents import KEY_BYTES, Question, question
from sparse_attn.files import check_regular, read_json, read_text
from sparse_attn.spec import CompressedSpec, Spec
from sparse_attn.spec.fields import short

KEYS = ("messages", "tools", "tool_choice", "thinking", "reasoning_effort")  # what changes a prompt
MODEL = "DeepSeek-V4-Pro"  # the package's name for the prompts of DeepSeek-V4, Flash and Pro


SHIPPED = Path("<the conversation that ships>")  # in place of a file


def as_text(path: Path) -> tuple[str, Question | None]:
    """The texts of the conversation in ``path``, a line each, as a model without tokens of conversations reads them;
    and what SHIPPED asks for. ValueError names what is no conversation, and what is more than texts."""
    asked = question() if path == SHIPPED else None
    request = shipped(asked) if asked else conversation(path)
    if unread := [key for key in request if key != "messages"]:
        raise ValueError(f"{path}: {unread[0]}: got it, allowed: messages, models that ship here read nothing else")
    texts = []
    for number, message in enumerate(request["messages"]):
        content = message.get("content") if isinstance(message, Mapping) else None
        parts = [part.get("text") for part in content] if isinstance(content, list) else [content]
        if not all(isinstance(part, str) for part in parts):
            raise ValueError(f"{path}: messages {number}: got {short(message)}, allowed: a role and a content of texts")
        texts += parts
    return "\n".join(texts), asked


def shipped(asked: Question) -> dict[str, Any]:
    """A conversation that a model which ships can answer: a text with records, and the key of one."""
    at = len(asked.text) - KEY_BYTES - 2
    messages = (("system", asked.text[:at]), ("user", asked.text[at:]))
    return {"messages": [{"role": role, "content": content} for role, content in messages]}


def chat_ids(path: Path, folder: Path | None, spec: Spec | CompressedSpec) -> list[int]:
    """The ids of the conversation in ``path`` by the tokenizer.json of ``folder``.

    path: a JSON list of messages, or an object as a chat completion takes it, with KEYS alone. Thinking is on unless it
    says otherwise.

    ValueError names what is no conversation, and a model that is not DeepSeek-V4. ImportError names the extra.
    """
    if path == SHIPPED:
        raise ValueError("--chat: got no FILE.json, allowed: without one for models that ship here")
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
