"""The quality gate: the models that ship read as well by every path, and no longer do once something is wrong.

On a CPU a small sample, which must come out without a flaw; on a GPU hundreds of values, and the compiled and replayed
paths too (test_compile and test_generate hold compiled steps to eager ones on a CPU).
"""

from __future__ import annotations

import functools
import hashlib
import time
from dataclasses import replace

import pytest
import torch
from expecttest import assert_expected_inline

from sparse_attn import Model
from sparse_attn.checkpoints.convert import convert
from sparse_attn.checkpoints.load import load
from sparse_attn.cli.documents import held_out_text, question, retrieval_documents, tail_of, text_documents
from sparse_attn.cli.quality import WAYS, Way, encode, measure, score
from sparse_attn.cli.quality_report import DEFAULT_CONTEXT
from sparse_attn.cli.shipped import folder_of, shipped_models, tokenizer_of
from sparse_attn.generation.text import byte_tokenizer
from sparse_attn.layout import LatentFp8Layout
from sparse_attn.ops.topk.select import reference as selection
from sparse_attn.pipeline import cache_layouts
from sparse_attn.weight_layout import PackedWeight

CONTEXT = DEFAULT_CONTEXT
MODELS = tuple(shipped_models())
ENOUGH, PUBLISHED_ENOUGH, SPOILT = 0.99, 0.95, 0.9
DENSE_SHARE = 1.01  # of dense attention's bits per byte
FEW_SHARE = 1.02  # the same of three texts
NOISE = 0.004  # bits per byte between paths that quantise alike: one fp8 code here or there
PUBLISHED_SHARE = {"reader-v32": 1.02, "reader-v4": 1.1}  # of bf16's bits per byte, quantised after training
FP8_NOISE = 0.01  # bits per byte that quantised caches cost


@functools.cache
def model(name, device="cpu", dtype=torch.float32):
    folder = folder_of(name)
    spec, params = load(folder, device=device, dtype=dtype)
    return spec, params, tokenizer_of(folder, spec)


def sample(name, texts, asked, seed=5):
    tokenizer = model(name)[2]
    return (
        [encode(document, tokenizer) for document in text_documents(texts, CONTEXT)],
        [encode(document, tokenizer) for document in retrieval_documents(asked, CONTEXT, seed)],
    )


@functools.cache
def quality(name, way, device="cpu", dtype=torch.float32, texts=1, asked=2, seed=5):
    spec, params, _ = model(name, device, dtype)
    return measure(spec, params, WAYS[way], *sample(name, texts, asked, seed))


@pytest.mark.parametrize("name", MODELS)
def test_small_enough(name):
    folder = shipped_models()[name]
    spec, params, _ = model(name)
    predicting = load(folder, mtp=True)[1]
    beside = sum(value.numel() for key, value in predicting.items() if key.startswith("mtp."))
    assert 0 < 2 * beside <= 2_000_000  # bytes
    assert (folder / "model.safetensors").stat().st_size <= 8_000_000 + 2 * beside
    assert sum(value.numel() for key, value in params.items() if not key.startswith("rope")) <= 4_000_000
    assert spec.index.top_k <= CONTEXT // getattr(spec, "indexed_ratio", 1) // 8


@pytest.mark.few(1)
@pytest.mark.parametrize("name", MODELS)
def test_selected_keys_are_worth_all_of_them(name):
    """So few texts scatter by a percent of their own; on a GPU there are enough of them to tell less."""
    few = dict(texts=3, asked=0)
    assert quality(name, "sparse", **few).bits_per_byte <= FEW_SHARE * quality(name, "dense", **few).bits_per_byte


@pytest.mark.few(1)
@pytest.mark.parametrize("way", ("dense", "sparse", "fp8", "chunked"))
@pytest.mark.parametrize("name", MODELS)
def test_reads_as_well_by_every_path(name, way):
    mine, plain = quality(name, way), quality(name, "sparse")
    assert mine.asked > 20 and mine.retrieval >= ENOUGH
    if way != "dense":
        assert abs(mine.bits_per_byte - plain.bits_per_byte) < FP8_NOISE
    if way == "chunked":
        assert abs(mine.bits_per_byte - quality(name, "fp8").bits_per_byte) < NOISE


@pytest.mark.few(1)
@pytest.mark.parametrize("name", MODELS)
def test_token_by_token(name):
    """Fed one by one, the answers of a document are the ones of its prefill."""
    spec, params, tokenizer = model(name)
    asked = [encode(document, tokenizer) for document in retrieval_documents(2, 400, seed=5)]
    found = measure(spec, params, WAYS["decoded"], [], asked)
    assert found.right == found.asked == 10


@pytest.mark.few(0)
@pytest.mark.kernel
@pytest.mark.parametrize("name", MODELS)
def test_kernels_predict_what_the_reference_does(name, device):
    """A few tokens and fewer keys to select, so that the interpreter can have it."""
    spec, params, tokenizer = model(name, str(device))
    spec = replace(spec, index=replace(spec.index, top_k=12 // getattr(spec, "indexed_ratio", 1)))
    (document,) = retrieval_documents(1, 40, seed=1, queries=1)
    asked = encode(document, tokenizer)
    asked = asked._replace(ids=asked.ids[:18])
    layouts = cache_layouts(spec, "fp32")
    by = {}
    for impl in ("triton", "reference"):
        by[impl] = score(Model(spec, params, layouts, impl), [asked], Way(impl, "plain", impl))[0]
    torch.testing.assert_close(by["triton"][0], by["reference"][0], atol=2e-3, rtol=2e-3)
    assert torch.equal(by["triton"][1], by["reference"][1])


@pytest.mark.gpu
@pytest.mark.parametrize("way", [name for name, way in WAYS.items() if name != "dense"])
@pytest.mark.parametrize("name", MODELS)
def test_reads_as_well_on_a_gpu(name, way, record_property):
    many = dict(device="cuda", dtype=torch.bfloat16, texts=32, asked=32, seed=0)
    dense, mine = quality(name, "dense", **many), quality(name, way, **many)
    for which, found in (("dense", dense), (way, mine)):
        record_property(which, f"{found.bits_per_byte:.4f} bits/byte, {found.right} of {found.asked} values")
    assert mine.asked > 400 and dense.retrieval >= ENOUGH and mine.retrieval >= ENOUGH
    assert mine.bits_per_byte <= DENSE_SHARE * dense.bits_per_byte
    assert abs(mine.right - dense.right) <= 4


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Weights of a model that ships, quantised after its training as published files are."""
    home = tmp_path_factory.mktemp("published")

    @functools.cache
    def load_published(name, device="cpu", dtype=torch.float32):
        folder = home / f"{name}-{device}"
        convert(folder_of(name), folder, "published")
        return load(folder, device=device, dtype=dtype)

    return load_published


@pytest.mark.few(1)
@pytest.mark.parametrize("activations", ["exact", "fp8"])
@pytest.mark.parametrize("name", MODELS)
def test_published_forms_read_nearly_as_well(name, activations, published):
    """Experts in fp4 and linear layers in fp8 (reader-v4), all in fp8 (reader-v32)."""
    spec, params = published(name)
    layouts = {key: weight.layout for key, weight in params.items() if isinstance(weight, PackedWeight)}
    assert layouts["layers.1.moe.down"].startswith("e2m1/1x32" if name == "reader-v4" else "e4m3/")
    found = measure(spec, params, WAYS["fp8"], *sample(name, 1, 2), prefill_activations=activations)
    plain = quality(name, "fp8")
    assert found.asked > 20 and found.retrieval >= PUBLISHED_ENOUGH
    assert found.bits_per_byte <= PUBLISHED_SHARE[name] * plain.bits_per_byte


@pytest.mark.gpu
@pytest.mark.parametrize(
    "way, activations", [("sparse", "exact"), ("fp8", "exact"), ("replayed", "exact"), ("fp8", "fp8")]
)
@pytest.mark.parametrize("name", MODELS)
def test_published_forms_read_nearly_as_well_on_a_gpu(name, way, activations, published, record_property):
    many = dict(texts=32, asked=32, seed=0)
    plain = quality(name, way, "cuda", torch.bfloat16, **many)
    packed = published(name, "cuda", torch.bfloat16)
    found = measure(*packed, WAYS[way], *sample(name, **many), prefill_activations=activations)
    for which, one in (("bf16", plain), ("published", found)):
        record_property(which, f"{one.bits_per_byte:.4f} bits/byte, {one.right} of {one.asked} values")
    assert found.asked > 400 and found.retrieval >= PUBLISHED_ENOUGH
    assert found.bits_per_byte <= PUBLISHED_SHARE[name] * plain.bits_per_byte


def spoilt_rope(spec, monkeypatch):
    return replace(spec, rope_interleaved=not spec.rope_interleaved)


def one_in_eight_lost(spec, monkeypatch):
    whole = selection.top_k_per_row

    def lossy(*args):
        chosen = whole(*args)
        return torch.where(torch.arange(chosen.shape[1]) % 8 == 7, -1, chosen)

    monkeypatch.setattr(selection, "top_k_per_row", lossy)
    return spec


def doubled_scales(spec, monkeypatch):
    decode = LatentFp8Layout.decode

    def doubled(self, *args):
        values = decode(self, *args)
        return torch.cat([2 * values[:, : self.latent], values[:, self.latent :]], 1)

    monkeypatch.setattr(LatentFp8Layout, "decode", doubled)
    return spec


@pytest.mark.few(1)
@pytest.mark.parametrize("spoil", (spoilt_rope, one_in_eight_lost, doubled_scales), ids=lambda spoil: spoil.__name__)
def test_falls_once_something_is_wrong(spoil, monkeypatch):
    spec, params, _ = model("reader-v32")
    texts, asked = sample("reader-v32", 0, 2)
    found = measure(spoil(spec, monkeypatch), params, WAYS["fp8"], texts, asked)
    assert found.asked > 20 and found.retrieval < SPOILT


def test_documents():
    for document in retrieval_documents(3, CONTEXT, seed=9):
        text = document.text
        assert len(text) <= CONTEXT and text.isascii()
        start = 0
        for place, piece in enumerate(document.pieces):
            if place in document.scored:
                key = text[start - 5 : start - 1]
                assert start >= tail_of(CONTEXT) and text.index(f"[{key}={piece}]") < tail_of(CONTEXT)
                assert text.count(f"[{key}=") == 2
            start += len(piece)
    for document in text_documents(4, CONTEXT):
        assert document.text in held_out_text() and len(document.pieces[1]) == CONTEXT - tail_of(CONTEXT)
    read, value = question()
    assert f"{read[-6:]}{value}]" in read and read.endswith("=")


def records_of(document):
    """Keys of the records, and those asked for: the four letters before a value."""
    tail, text, start = tail_of(len(document.text)), document.text, 0
    records, asked = [], []
    for place, piece in enumerate(document.pieces):
        if piece.isdecimal() and document.pieces[place - 1].endswith("="):
            (records if start < tail else asked).append(text[start - 5 : start - 1])
        start += len(piece)
    return records, asked


@pytest.mark.parametrize("length", (24_960, 25_000, 100_000, 160_000, 320_000))
def test_documents_of_long_contexts(length):
    """As many records as the length has room for, under distinct keys that share letters; made in no time."""
    before = time.process_time()
    (document,) = retrieval_documents(1, length, seed=3)
    encode(document, byte_tokenizer())
    assert time.process_time() - before < 2
    records, asked = records_of(document)
    assert len(asked) == len(document.scored) >= length // 80
    assert len(records) == 2 * len(asked) == len(set(records)) and set(asked) <= set(records)
    letters = len(set("".join(records)))
    assert letters == 5 or (letters - 1) ** 4 < len(records)


def test_documents_are_those_of_the_figures_in_the_readme():
    written = repr([retrieval_documents(2, length, seed=0) for length in (400, 1024, 8192)])
    assert_expected_inline(hashlib.sha256(written.encode()).hexdigest()[:16], """85c92d855c7a1bc2""")


@pytest.mark.parametrize("length", range(40, 100))
def test_the_shortest_documents_ask_for_something(length):
    (document,) = retrieval_documents(1, length)
    records, asked = records_of(document)
    assert asked and set(asked) <= set(records)
    (document,) = text_documents(1, length)
    assert document.pieces[1]


def test_lengths_without_room_are_refused():
    for documents in (retrieval_documents, text_documents):
        for length in (39, 10, 0, -1):
            with pytest.raises(ValueError, match=f"length: got {length}, allowed: at least 40"):
                documents(1, length)
    with pytest.raises(ValueError, match="length: got room for 500000 records, allowed: at most 456976"):
        retrieval_documents(1, 20_000_000)
