"""What `generate --plot` draws, read from the figure: panels, selections, the record's outline, labels."""

import dataclasses

import numpy
import pytest
import torch

from sparse_attn.cli import output, plot
from sparse_attn.cli.documents import MENTION_BYTES, VALUE_BYTES, asked_record, question
from sparse_attn.cli.main import main
from sparse_attn.generation.selections import shares
from sparse_attn.generation.text import byte_tokenizer
from sparse_attn.spec import preset


def steps(layers=2, prompt=40, written=12, top_k=6, ratio=1, record=None, answer=0) -> plot.Steps:
    """Selections at random of what each position sees."""
    draw = torch.Generator().manual_seed(0)
    chosen = torch.full((layers, prompt + written - 1, top_k), -1, dtype=torch.int32)
    for rows in chosen:
        for position, row in enumerate(rows):
            some = torch.randperm((position + 1) // ratio, generator=draw)[:top_k]
            row[: len(some)] = some
    tokens = [chr(ord("a") + place % 26) for place in range(prompt + written)]
    return plot.Steps("some_model", tokens, prompt, range(3, 3 + layers), [*chosen], top_k, ratio, record, answer)


def drawn(figure):
    """(panels, their images' data): [layers][columns]."""
    *panels, _bar = figure.axes
    columns = panels[0].get_subplotspec().get_gridspec().ncols
    panels = [panels[row : row + columns] for row in range(0, len(panels), columns)]
    return panels, [[axes.images[0].get_array() for axes in row] for row in panels]


def outlined(axes) -> list[tuple[float, float]]:
    return [(each.get_x(), each.get_x() + each.get_width()) for each in axes.patches]


def labels(ticks) -> list[str]:
    return [tick.get_text() for tick in ticks]


@pytest.mark.parametrize("width", (1, 4, 7, 100))
def test_shares_are_of_the_keys_that_a_row_sees(width):
    seen = torch.tensor([0, 1, 9, 23])
    chosen = torch.tensor([[-1, -1, -1], [0, -1, -1], [8, 2, 3], [22, 0, 7]], dtype=torch.int32)
    found = shares(chosen, seen, width)
    for row, there in enumerate(seen.tolist()):
        for bin, share in enumerate(found[row].tolist()):
            keys = [key for key in range(bin * width, (bin + 1) * width) if key < there]
            wanted = sum(key in chosen[row].tolist() for key in keys) / len(keys) if keys else float("nan")
            assert share == pytest.approx(wanted, nan_ok=True)
    assert found.shape == (4, -(-23 // width))


@pytest.mark.parametrize("prompt, width", ((40, 1), (900, 5)))
def test_a_panel_a_layer_and_a_row_a_step(prompt, width):
    given = steps(prompt=prompt)
    figure = plot.draw(given)
    panels, images = drawn(figure)
    assert [len(row) for row in panels] == [1, 1] and [row[0].get_ylabel() for row in panels] == ["layer 3", "layer 4"]
    queries = torch.arange(prompt + 12 - plot.STEPS - 1, prompt + 11)  # of the last tokens
    for (axes,), (image,), chosen in zip(panels, images, given.chosen):
        numpy.testing.assert_array_equal(image.filled(float("nan")), shares(chosen[queries], queries + 1, width))
        assert labels(axes.get_yticklabels()) == given.tokens[-plot.STEPS :] and not outlined(axes)
        assert axes.images[0].get_extent() == [-0.5, image.shape[1] * width - 0.5, plot.STEPS - 0.5, -0.5]
    title, bar = figure.get_suptitle(), figure.axes[-1].get_ylabel()
    assert all(part in title for part in ("some_model", f"top-k 6 of {prompt + 11} keys", "tokens 5 to 12 of 12"))
    assert ("selected (100%) or not" if width == 1 else f"share of a bin of {width} tokens") in bar
    assert "position in the context" in panels[-1][0].get_xlabel() and "wrote" in figure.get_supylabel()


@pytest.mark.parametrize("ratio", (1, 4))
def test_the_record_is_outlined_and_enlarged(ratio):
    record = range(20, 31)
    given = steps(ratio=ratio, record=record, answer=4)
    panels, images = drawn(plot.draw(given))
    queries = torch.arange(39, 39 + plot.STEPS)  # from the first written token on
    for row, (_, image), chosen in zip(panels, images, given.chosen):
        numpy.testing.assert_array_equal(image.filled(float("nan")), shares(chosen[queries], (queries + 1) // ratio, 1))
        assert [outlined(axes) for axes in row] == [[(19.5, 30.5)]] * 2
        answer = [tick.get_color() == plot.ANSWER for tick in row[0].get_yticklabels()]
        assert answer == [True] * 4 + [False] * 4 and row[1].get_xlim() == (14.5, 35.5)
    ticks = panels[-1][1].get_xticklabels()
    assert labels(ticks) == given.tokens[15:36]
    assert [tick.get_color() == plot.ANSWER for tick in ticks] == [15 + place in record for place in range(21)]


def test_many_layers_have_one_row_each():
    panels, images = drawn(plot.draw(steps(layers=61, prompt=8, written=3)))
    assert len(panels) == 61 and {image.shape for (image,) in images} == {(1, 10)}
    assert labels(panels[0][0].get_yticklabels()) == ["k"]


def test_any_token_has_a_label(tmp_path):
    given = steps(written=8)._replace(tokens=["$x$", " \n", "\u4e2d", "\ufffd", "\\", "a" * 30, "$", ""] * 6)
    figure = plot.draw(given)
    plot.save(tmp_path / "x.svg", figure)
    shown = labels(drawn(figure)[0][0][0].get_yticklabels())
    assert shown == ["$x$", "\u2423\\n", "\\u4e2d", "\\ufffd", "\\\\", "aaaaaaaaa\u2026", "$", ""]


def test_the_record_of_the_question_is_found():
    read, value = question()
    place = asked_record(read)
    assert read[place.start : place.stop] == f"{read[read.rindex('[') :]}{value}]" and len(place) == MENTION_BYTES


def test_the_reader_selects_the_value_that_it_writes(tmp_path, monkeypatch):
    """Some layer has every digit of the record among its keys when it writes the first; none is outlined elsewhere."""
    figures = []
    monkeypatch.setattr(plot, "save", lambda path, figure: figures.append(figure))
    common = ["generate", "--device", "cpu", "--plot", str(tmp_path / "x.png"), "--max-new-tokens"]
    assert main([*common, "8"]) == 0 == main([*common, "2", "--prompt", question()[0]])
    (panels, images), (others, _) = map(drawn, figures)
    record = asked_record(question()[0])
    assert [len(row) for row in panels] == [2] * 4 and [len(row) for row in others] == [1] * 4
    assert {tuple(outlined(axes)) for row in panels for axes in row} == {((record.start - 0.5, record.stop - 0.5),)}
    value = slice(record.stop - 1 - VALUE_BYTES, record.stop - 1)
    assert any((near[0, value] == 1).all() for _, near in images)
    assert labels(panels[0][0].get_yticklabels())[:5] == [*question()[1], "]"]
    assert not any(outlined(axes) for row in others for axes in row)


def test_a_model_without_indexers_is_refused():
    spec = preset("tiny-v4")
    output.check_plot(spec)
    window = dataclasses.replace(spec, layer_kinds=("window",) * spec.num_layers)
    with pytest.raises(ValueError, match="--plot: got .*, which has no indexer, allowed: models with one"):
        output.check_plot(window)


@pytest.mark.parametrize("tokenizer, shown", ((None, ["97", "98"]), (byte_tokenizer(), ["a", "b"])))
def test_tokens_without_text_are_shown_as_ids(tokenizer, shown):
    spec = preset("tiny-v32")
    given = output.steps(spec, [97], [98], [torch.zeros(1, 4)] * spec.num_layers, tokenizer, "x", None)
    assert given.tokens == shown and given.record is None and not given.answer
