"""Weights on their way to a GPU by way of two buffers: every byte arrives, whatever the sizes."""

from __future__ import annotations

import pytest
import torch
from support.caches import same

from sparse_attn.checkpoints import load as loading
from sparse_attn.checkpoints import pinned_copies
from sparse_attn.checkpoints.load import load
from sparse_attn.checkpoints.pinned_copies import Staging
from sparse_attn.checkpoints.published import write_published
from sparse_attn.spec import preset
from sparse_attn.weight_layout import PackedWeight

DTYPES = (torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.int64)


def values(shape, dtype):
    raw = torch.randint(256, (*shape, dtype.itemsize), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    return raw.view(dtype).squeeze(-1)


def check_copies(device, nbytes):
    """One after the other by the same buffers, larger and smaller than these, and not a multiple of them."""
    stage, copies = Staging(device, nbytes), []
    for dtype in DTYPES:
        for shape in ((7, 33), (1,), (0, 5), (129,), (64, 64)):
            source = values(shape, dtype)
            target = values(shape, dtype).to(device).fill_(0)
            stage.copy(target, source)
            copies.append((target, source))
    for target, source in copies:
        assert torch.equal(target.cpu().view(-1).view(torch.uint8), source.view(-1).view(torch.uint8)), source.dtype


@pytest.mark.parametrize("nbytes", (1, 24, 100, 4096, 1 << 20))
def test_every_byte_arrives(nbytes, device="cpu"):
    check_copies(device, nbytes)


@pytest.mark.gpu
@pytest.mark.parametrize("nbytes", (1, 24, 4096, 1 << 20))
def test_every_byte_arrives_on_a_gpu(nbytes):
    check_copies("cuda", nbytes)


def test_other_dtypes_are_rounded_on_arrival(device="cpu"):
    source = torch.randn(19, 31)
    for dtype in (torch.bfloat16, torch.float16):
        target = torch.empty(19, 31, dtype=dtype, device=device)
        Staging(device, 200).copy(target, source)
        assert torch.equal(target.cpu(), source.to(dtype))
    strided = torch.randn(8, 6).t()
    target = torch.empty(6, 8)
    Staging("cpu", 64).copy(target, strided)
    assert torch.equal(target, strided)


def test_buffers_are_no_larger_than_what_they_carry(monkeypatch):
    monkeypatch.setattr(pinned_copies, "PIECE", 4096)
    sizes = [sum(buffer.numel() for buffer in Staging("cpu", nbytes)._buffers) for nbytes in (100, 1 << 20)]
    assert sizes == [192, 8192]


def check_loaded(folder, device, **more):
    for got, want in zip(load(folder, device=device, **more)[1].values(), load(folder, **more)[1].values()):
        parts = [(got.codes, want.codes), (got.scales, want.scales)] if isinstance(got, PackedWeight) else [(got, want)]
        assert all(same(*part) for part in parts)


@pytest.mark.gpu
@pytest.mark.parametrize("nbytes", (4096, 1 << 25))
@pytest.mark.parametrize("name,form", (("tiny_v4", "published"), ("tiny_v32", "fused"), ("tiny_glm5", "bf16")))
def test_a_gpu_holds_what_the_cpu_does(name, form, nbytes, tmp_path, monkeypatch):
    monkeypatch.setattr(pinned_copies, "PIECE", nbytes)
    write_published(tmp_path, preset(name), form, seed=1)
    for more in ({}, {"dtype": torch.float32}, {"mtp": form != "fused"}):
        check_loaded(tmp_path, "cuda", **more)


def load_by_way_of(monkeypatch, folder, nbytes):
    """As on a GPU, but for the device. Also what was read from files rather than from their mappings."""
    fill, found = loading.fill, []

    def filled(readings, checkpoint, *args, **more):
        def place(source):
            found.append(checkpoint.place(source))
            return found[-1]

        return fill(readings, checkpoint, *args, **more | {"copy": Staging("cpu", nbytes, place).copy})

    with monkeypatch.context() as patch:
        patch.setattr(loading, "fill", filled)
        return load(folder)[1], found


@pytest.mark.parametrize("name,form", (("tiny_v4", "published"), ("tiny_v32", "fused"), ("tiny_glm5", "bf16")))
@pytest.mark.parametrize("least", (16, 1 << 20))
def test_loading_by_way_of_buffers(least, name, form, tmp_path, monkeypatch):
    """``least`` 16: by several threads."""
    monkeypatch.setattr(pinned_copies, "LEAST", least)
    write_published(tmp_path, preset(name), form, seed=1)
    want, (params, found) = load(tmp_path)[1], load_by_way_of(monkeypatch, tmp_path, 1000)
    for key, got in params.items():
        parts = zip(got[:2], want[key][:2]) if isinstance(got, PackedWeight) else [(got, want[key])]
        assert all(same(*part) for part in parts), key
    assert sum(place is not None for place in found) >= len(found) / 3  # not scales that become finer


@pytest.mark.parametrize("least", (16, 1 << 20))
def test_a_file_that_was_cut_since_it_was_opened(least, tmp_path, monkeypatch):
    monkeypatch.setattr(pinned_copies, "LEAST", least)
    path = tmp_path / "x"
    path.write_bytes(bytes(100))
    stage = Staging("cpu", 64, lambda source: (path, 60))
    with pytest.raises(ValueError, match="x: got 100 bytes, allowed: as many as it had when it was opened"):
        stage.copy(torch.empty(50, dtype=torch.uint8), torch.empty(50, dtype=torch.uint8))
