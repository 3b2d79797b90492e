"""Conversations with DeepSeek-V4, rendered by deepseek-recipe, and as text for models that ship."""

from __future__ import annotations

import json
import re
import shutil
import sys

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from sparse_attn.checkpoints.save import save
from sparse_attn.cli.chat import as_text, chat_ids, shipped
from sparse_attn.cli.documents import question
from sparse_attn.cli.main import main
from sparse_attn.models.params import random_params
from sparse_attn.spec import preset

BOS, USER, ASSISTANT, THINK, END_THINK = SPECIAL = """
    <｜begin▁of▁sentence｜> <｜User｜> <｜Assistant｜> <think> </think>""".split()
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
HELLO = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Hello {USER}"}]
QUIET = {"messages": HELLO, "thinking": {"type": "disabled"}}


def write_tokenizer(folder, special=SPECIAL):
    """A token a byte, and those of conversations."""
    found = Tokenizer(models.BPE(vocab={sign: number for number, sign in enumerate(BYTES)}, merges=[]))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens([AddedToken(name, special=True) for name in special])
    found.save(str(folder / "tokenizer.json"))
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    from dataclasses import replace

    spec = replace(preset("tiny_v4"), vocab_size=300)
    save(folder, spec, random_params(spec, seed=0))
    write_tokenizer(folder)
    return folder


def write(path, value):
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


def test_a_conversation_is_special_tokens_and_plain_text(model, tmp_path):
    """A special token that a user spells is text."""
    pytest.importorskip("deepseek_recipe")
    ids = chat_ids(write(tmp_path / "chat.json", QUIET), model, preset("tiny_v4"))
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
    tokenizer.encode_special_tokens = True
    number = {name: len(BYTES) + at for at, name in enumerate(SPECIAL)}
    text = tokenizer.encode(f"Hello {USER}").ids
    assert ids == [number[BOS], *tokenizer.encode("Be brief.").ids, number[USER], *text, number[ASSISTANT],
                   number[END_THINK]]  # fmt: skip
    assert number[USER] not in text


def test_the_command_line_continues_it(model, tmp_path, capsys):
    pytest.importorskip("deepseek_recipe")
    for value in (QUIET, HELLO):
        path, out = write(tmp_path / "chat.json", value), tmp_path / "out.json"
        assert main(["generate", "--model", str(model), "--chat", str(path), "--device", "cpu", "--max-new-tokens",
                     "2", "--ignore-eos", "--json", str(out)]) == 0  # fmt: skip
        found = json.loads(out.read_text())
        assert found["prompt_tokens"] == len(chat_ids(path, model, preset("tiny_v4"))) and len(found["tokens"]) == 2


REFUSED = {
    "not JSON": ("{", "chat.json: not JSON"),
    "a key twice": ('{"messages": [], "messages": []}', "chat.json: not JSON: key 'messages' stands twice"),
    "a number": (3, "got 3, allowed: a list of messages, or an object that has one"),
    "no messages": ({"tools": []}, "allowed: a list of messages, or an object that has one"),
    "none": ([], "Empty input messages"),
    "a temperature": ({"messages": HELLO, "temperature": 1}, "'temperature': got it, allowed: messages, tools"),
    "another role": ([{"role": "narrator", "content": "x"}], "unknown variant `narrator`"),
    "an image": ([{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
                 "messages 0: got {'type': 'image_url', 'image_url': {'url': 'x'}}, allowed: texts"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_no_conversation_is_refused(case, model, tmp_path):
    pytest.importorskip("deepseek_recipe")
    value, message = REFUSED[case]
    with pytest.raises(ValueError) as caught:
        chat_ids(write(tmp_path / "chat.json", value), model, preset("tiny_v4"))
    assert message in str(caught.value) and "chat.json: " in str(caught.value)


def test_a_tokenizer_without_these_tokens_is_refused(model, tmp_path):
    pytest.importorskip("deepseek_recipe")
    write_tokenizer(tmp_path, special=())
    path = write(tmp_path / "chat.json", QUIET)
    with pytest.raises(ValueError, match=f'special token "{BOS}" is not in the added vocabulary'):
        chat_ids(path, tmp_path, preset("tiny_v4"))
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"tokenizer\.json: no tokenizer: "):
        chat_ids(path, tmp_path, preset("tiny_v4"))


def test_without_the_package_the_extra_is_named(model, tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "deepseek_recipe", None)
    path = write(tmp_path / "chat.json", QUIET)
    assert main(["generate", "--model", str(model), "--chat", str(path), "--device", "cpu"]) == 2
    assert "--chat needs deepseek-recipe: pip install 'sparse_attn[chat]'" in capsys.readouterr().err


def test_models_without_such_prompts_are_refused(model, tmp_path, capsys):
    path = write(tmp_path / "chat.json", QUIET)
    assert main(["generate", "--preset", "tiny-v32", "--chat", str(path), "--device", "cpu"]) == 2
    assert "--chat: got tiny_v32, allowed: DeepSeek-V4" in capsys.readouterr().err
    shutil.copy(model / "config.json", tmp_path)
    for folder, spec in ((None, preset("tiny_v4")), (tmp_path, preset("tiny_v4"))):
        with pytest.raises(ValueError, match="--chat: .* holds no tokenizer.json, allowed: a model that has one"):
            chat_ids(path, folder, spec)


def test_a_model_that_ships_answers_the_conversation_that_ships(tmp_path, capsys, monkeypatch):
    """Without deepseek-recipe: it reads the texts."""
    monkeypatch.setitem(sys.modules, "deepseek_recipe", None)
    common = ["generate", "--device", "cpu", "--model", "reader-v4", "--max-new-tokens", "6", "--json"]
    asked, found = question(), []
    assert main([*common, str(tmp_path / "out.json"), "--chat"]) == 0
    assert f"recorded {asked.value}, answered {asked.value}: " in capsys.readouterr().err
    found.append(json.loads((tmp_path / "out.json").read_text()))
    path = write(tmp_path / "chat.json", shipped(asked)["messages"])
    assert main([*common, str(tmp_path / "out.json"), "--chat", str(path)]) == 0
    found.append(json.loads((tmp_path / "out.json").read_text()))
    assert found[0]["text"] == found[1]["text"] and found[0]["text"].startswith(asked.value)
    parts = [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    assert as_text(write(path, parts)) == ("a\nb", None)


@pytest.mark.parametrize("value, message", [
    ({"messages": HELLO, "tools": []}, "tools: got it, allowed: messages, models that ship here read nothing else"),
    ([{"role": "user"}], "messages 0: got {'role': 'user'}, allowed: a role and a content of texts"),
])  # fmt: skip
def test_models_that_ship_read_texts_alone(value, message, tmp_path):
    with pytest.raises(ValueError, match=re.escape(f"chat.json: {message}")):
        as_text(write(tmp_path / "chat.json", value))


def test_another_model_is_given_a_file(model, capsys):
    assert main(["generate", "--model", str(model), "--chat", "--device", "cpu"]) == 2
    assert "--chat: got no FILE.json, allowed: without one for models that ship here" in capsys.readouterr().err
