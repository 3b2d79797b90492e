"""Text that comes token by token, and strings that end it."""

from __future__ import annotations

import random

import pytest

from sparse_attn import Model, Sampling, generate
from sparse_attn.generation.text import StopStrings, TextStream, byte_tokenizer
from sparse_attn.models.params import random_params
from sparse_attn.pipeline import cache_layouts
from sparse_attn.spec import preset

BYTES = byte_tokenizer()


def streamed(ids):
    stream = TextStream(BYTES.decode)
    pieces = [stream.push(token) for token in ids]
    return pieces, stream.rest()


def test_pieces_are_whole_characters_and_add_up_to_the_text():
    text = "café, 日本 and 🙂!"
    pieces, rest = streamed(BYTES.encode(text))
    assert "".join(pieces) == text and rest == "" and not any("\ufffd" in piece for piece in pieces)
    assert streamed(BYTES.encode("🙂")[:3]) == (["", "", ""], "\ufffd")


def test_bytes_that_are_no_text_add_up_to_it_too():
    generator = random.Random(0)
    for _ in range(200):
        ids = [generator.choice((65, 0xC3, 0xA9, 0xF0, 0x9F, 0x99, 0x82, 0xFF, 256, 300)) for _ in range(12)]
        pieces, rest = streamed(ids)
        assert "".join(pieces) + rest == BYTES.decode(ids)


def stopped(text, *stops):
    """(tokens taken, text before the stop, stop)."""
    watch, taken = StopStrings(BYTES.decode, stops), 0
    for token in BYTES.encode(text):
        taken += 1
        if watch.push(token):
            break
    return taken, watch.text, watch.found


def test_a_stop_string_ends_the_text_before_it():
    assert stopped("one two three", "two") == (7, "one ", "two")
    assert stopped("one two three", "four") == (13, "one two three", None)
    assert stopped("aaab", "aab") == (4, "a", "aab")
    assert stopped("over", "ver", "over") == (4, "", "over")  # the one that begins first
    assert stopped("日本語", "本") == (6, "日", "本")
    assert stopped("x", "x") == (1, "", "x")


def test_of_stop_strings_within_one_token_the_first_and_longest_counts():
    words = ["ab", "cd ef", "END."]
    watch = StopStrings(lambda ids: "".join(words[token] for token in ids), ("EN", "D", "END", "ef"))
    assert [watch.push(0), watch.push(1)] == [False, True] and (watch.text, watch.found) == ("abcd ", "ef")
    watch = StopStrings(lambda ids: "".join(words[token] for token in ids), ("EN", "D", "END"))
    assert watch.push(2) and (watch.text, watch.found) == ("", "END")


@pytest.mark.parametrize("stops", ["stop", [""], ["a", None], [3]])
def test_what_is_no_stop_string(stops):
    with pytest.raises(ValueError, match="^stops: got .*, allowed: texts of at least one character"):
        StopStrings(BYTES.decode, stops)


@pytest.mark.parametrize("name", ("tiny_v32", "tiny_v4"))
def test_prompts_end_one_by_one_where_their_watcher_says(name):
    """Tokens come to it in order, none after the end; a stop id ends a prompt as well."""
    spec = preset(name)
    model = Model(spec, random_params(spec, seed=1), cache_layouts(spec, "fp32"))
    prompts, seen = [[1, 2, 3], [7] * 30, [9]], [[], [], []]
    common = dict(max_new_tokens=9, prefill_tokens=8)
    draw = [Sampling(1.0, seed) for seed in (1, 2, 3)]
    whole = generate(model, prompts, sampling=draw, **common).tokens
    lengths = [4, 1, 9]

    def on_token(prompt, token):
        seen[prompt].append(token)
        return len(seen[prompt]) == lengths[prompt]

    draw[0] = draw[0]._replace(stop_ids=(whole[0][1],))
    found = generate(model, prompts, sampling=draw, on_token=on_token, keep_logits=True, logprobs=0, **common)
    end = whole[0].index(whole[0][1]) + 1
    assert found.tokens == seen == [whole[0][:end], whole[1][:1], whole[2]]
    for prompt, tokens, logits, logprobs in zip(prompts, found.tokens, found.logits, found.logprobs):
        assert len(logits) == len(prompt) + len(tokens) - 1 and len(logprobs.drawn) == len(tokens)
