"""Pictures of README and of the pages are what scripts/docs/pictures.py draws, and charts say what the record does."""

import re
import xml.etree.ElementTree as ET

import pytest
from docs import pictures

PAGES = pictures.PICTURES.parent
README = pictures.SCRIPTS.parent / "README.md"
SHOWN = re.compile(r"!\[([^]]*)\]\((?:scripts/docs/pages/)?pictures/([\w.]+)\)")
NAMESPACE = "{http://www.w3.org/2000/svg}"


def test_pictures_are_what_the_script_draws():
    there = {path.name: path.read_text() for path in pictures.PICTURES.glob("*.svg")}
    assert there == pictures.pictures(), "run scripts/docs/pictures.py --write"


@pytest.mark.parametrize("name", [f"{name}.svg" for name in ("v32", "v4", "seesaw", "ratios", "latency", "floors")])
def test_every_shape_has_a_colour_in_light_and_dark_and_stands_inside(name):
    root = ET.fromstring((pictures.PICTURES / name).read_text())
    width, height = float(root.get("width")), float(root.get("height"))
    light, dark = root.find(f"{NAMESPACE}style").text.split("@media(prefers-color-scheme:dark)")
    used = {word for one in root.iter() for word in one.get("class", "").split()} - {"line", "bold", "code"}
    for scheme in (light, dark):
        assert used <= {*re.findall(r"\.([\w-]+)\{(?:fill|stroke):#[0-9a-f]{6}\}", scheme)}
    for one in root.iter(f"{NAMESPACE}rect"):
        x, y, wide, high = (float(one.get(side)) for side in ("x", "y", "width", "height"))
        assert 0 <= x and 0 <= y and x + wide <= width and y + high <= height
    for one in root.iter(f"{NAMESPACE}text"):
        assert 0 < float(one.get("x")) < width and 0 < float(one.get("y")) < height


def test_every_picture_stands_in_a_page_and_has_words_for_who_does_not_see_it():
    shown = [found for page in (README, *PAGES.glob("*.md")) for found in SHOWN.findall(page.read_text())]
    assert {name for _, name in shown} == {path.name for path in pictures.PICTURES.iterdir()}
    assert all(len(words.split()) >= 4 for words, _ in shown)


def test_the_selection_picture_is_an_image_beside_the_command_that_draws_it():
    image = (pictures.PICTURES / "selected.png").read_bytes()
    assert image.startswith(b"\x89PNG\r\n") and len(image) <= 120_000
    before, _, _ = (PAGES / "checkpoints.md").read_text().partition("(pictures/selected.png)")
    assert "\nscripts/demo.sh --plot selected.png\n" in before


def record(**ratios):
    return recorded(
        {"suite": suite, "case": f"{number}", "peer": peer, "us": 1.0, "floor_us": None, "peer_us": 1.0, "ratio": ratio}
        for suite, (peer, *some) in ratios.items()
        for number, ratio in enumerate(some)
    )


def recorded(cases):
    versions = {"torch": "9.1", "triton": "9.2"}
    return {
        "gpu": "A GPU",
        "commit": "0123456789",
        "versions": versions,
        "parts": {"suites:1/1": {"records": [*cases]}},
    }


def test_the_chart_has_the_mean_and_the_worst_and_names_the_record(monkeypatch):
    monkeypatch.setattr(pictures, "SUITES", {"a": "this", "b": "that"})
    drawn = pictures.ratios(record(a=("FlashMLA decode", 4.0, 0.25), b=("DeepGEMM+vLLM", 2.0), c=("ours", 9.0)))
    texts = texts_of(drawn)
    rows = [texts[texts.index(suite) :][:3] for suite in ("this", "that")]
    assert rows == [["this", "1.00", "0.25"], ["that", "2.00", "2.00"]]
    assert "beside FlashMLA" in texts and "beside DeepGEMM + vLLM" in texts and "4.0" in texts  # beyond the axis
    assert any(text.startswith("A GPU, commit 0123456, torch 9.1, triton 9.2.") for text in texts)


@pytest.mark.parametrize("ratios", [{"a": ("FlashMLA", 1.0)}, {}])
def test_a_suite_beside_a_peer_has_to_be_in_the_chart(ratios, monkeypatch):
    monkeypatch.setattr(pictures, "SUITES", {} if ratios else {"b": "that"})
    with pytest.raises(ValueError, match="SUITES: "):
        pictures.ratios(record(**ratios))


def test_the_picture_selects_as_top_k_does():
    assert pictures.winners([3, 9, 9, 1, 9], 2) == [1, 2]


def texts_of(drawn):
    return [one.text for one in ET.fromstring(drawn).iter(f"{NAMESPACE}text")]


def test_latencies_have_a_point_a_case_and_the_figures_of_the_record(monkeypatch):
    monkeypatch.setattr(pictures, "LAYERS", {"a layer": ("layer", "top-k 8, ")})
    cases = {(1, 32768): (20, 30), (1, 131072): (41, 52), (8, 131072): (90, 120)}
    drawn = pictures.latency(
        recorded(
            {"suite": "layer", "case": f"top-k 8, requests {count}, context {context}", "us": us, "peer_us": peer_us}
            for (count, context), (us, peer_us) in cases.items()
        )
    )
    assert {"20", "30", "41", "52", "90", "120", "1 request", "8 requests", "context 32K"} <= {*texts_of(drawn)}
    circles = [*ET.fromstring(drawn).iter(f"{NAMESPACE}circle")]
    heights = sorted((float(one.get("cy")), one.get("class")) for one in circles)
    assert [kind for _, kind in heights] == ["other", "chosen", "other", "chosen", "other", "chosen"]
    assert len({one.get("cx") for one in circles}) == 2


def test_floors_have_the_median_and_the_best_share_of_a_suite(monkeypatch):
    monkeypatch.setattr(pictures, "FLOORS", {"some": ("a",)})
    monkeypatch.setattr(pictures, "SUITES", {"a": "this **"})
    cases = [{"suite": "a", "us": us, "floor_us": floor} for us, floor in ((10, 1), (10, 2), (10, 9), (10, None))]
    texts = texts_of(pictures.floors(recorded(cases)))
    assert {*texts[texts.index("this") :][1:4]} == {"20%", "90%", "3"}


@pytest.mark.parametrize("chart, name", [(pictures.latency, "LAYERS"), (pictures.floors, "FLOORS")])
def test_a_chart_names_a_suite_that_the_record_lacks(chart, name):
    with pytest.raises(ValueError, match=f"{name}: .* not in the record"):
        chart(recorded([]))
