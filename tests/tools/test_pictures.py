"""Pictures of README and of the pages are what scripts/docs/pictures.py draws, and the chart says what the record does."""

import re
import xml.etree.ElementTree as ET

import pytest
from docs import pictures

NAMESPACE = "{http://www.w3.org/2000/svg}"


def test_pictures_are_what_the_script_draws():
    there = {path.name: path.read_text() for path in pictures.PICTURES.iterdir()}
    assert there == pictures.pictures(), "run scripts/docs/pictures.py --write"


@pytest.mark.parametrize("name", ["v32.svg", "v4.svg", "ratios.svg"])
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


def record(**ratios):
    cases = [
        {"suite": suite, "case": f"{number}", "peer": peer, "us": 1.0, "floor_us": None, "peer_us": 1.0, "ratio": ratio}
        for suite, (peer, *some) in ratios.items()
        for number, ratio in enumerate(some)
    ]
    versions = {"torch": "9.1", "triton": "9.2"}
    return {"gpu": "A GPU", "commit": "0123456789", "versions": versions, "parts": {"suites:1/1": {"records": cases}}}


def test_the_chart_has_the_mean_and_the_worst_and_names_the_record(monkeypatch):
    monkeypatch.setattr(pictures, "SUITES", {"a": "this", "b": "that"})
    drawn = pictures.ratios(record(a=("FlashMLA decode", 4.0, 0.25), b=("DeepGEMM+vLLM", 2.0), c=("ours", 9.0)))
    texts = [one.text for one in ET.fromstring(drawn).iter(f"{NAMESPACE}text")]
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
