"""Checkpoint folders we write: read back bit for bit, by checkpoints.load and by transformers."""

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors.torch import load_file, save_file

from sparse_attn import files
from sparse_attn.checkpoints.load import load
from sparse_attn.checkpoints.published import write_published
from sparse_attn.checkpoints.save import save
from sparse_attn.models.params import INTEGER_NAMES, param_dtype, random_params
from sparse_attn.spec import PRESETS, YarnSpec, from_hf_config, preset, tiny_v4, tiny_v32, to_hf_config

TINY = ("tiny_v32", "tiny_glm5", "tiny_v4")


@pytest.mark.parametrize("name", PRESETS)
def test_config_says_the_whole_spec(name):
    spec = preset(name)
    assert replace(from_hf_config(to_hf_config(spec)), name=name) == spec


@pytest.mark.parametrize(
    "spec, field",
    [
        (replace(tiny_v32(), softmax_scale=0.3, yarn=None), "softmax_scale"),
        (replace(tiny_v32(), latent_norm_eps=1e-3), "latent_norm_eps"),
        (replace(tiny_v4(), softmax_scale=1.0), "softmax_scale"),
        (replace(tiny_v4(), index=replace(tiny_v4().index, hadamard=True)), "index"),
    ],
)
def test_what_no_config_says_is_refused(spec, field):
    with pytest.raises(ValueError, match=f"spec: got {field} that no config.json"):
        to_hf_config(spec)


def test_other_yarns():
    for spec in (tiny_v32(), tiny_v4()):
        other = replace(spec, yarn=YarnSpec(7.0, 100, 16.0, 2.0, 1.1))
        if spec.name == "tiny_v32":
            other = replace(other, softmax_scale=0.123456)
            assert abs(from_hf_config(to_hf_config(spec)).softmax_scale - spec.softmax_scale) == 0
            other = replace(other, softmax_scale=from_hf_config(_with_scale(other)).softmax_scale)
        assert replace(from_hf_config(to_hf_config(other)), name=other.name) == other


def _with_scale(spec):
    """A config of about the spec's scale: mscale_all_dim has twelve decimals."""
    from sparse_attn.spec.parts import mscale_of

    config = to_hf_config(replace(tiny_v32(), yarn=None, softmax_scale=spec.qk_dim**-0.5))
    both = mscale_of(spec.softmax_scale, spec.qk_dim, spec.yarn.factor)
    rope = dict(rope_type="yarn", rope_theta=1e4, factor=7.0, original_max_position_embeddings=100, mscale=both,
                mscale_all_dim=both, beta_fast=16.0, beta_slow=2.0, attention_factor=1.1)  # fmt: skip
    return config | {"rope_parameters": rope}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", TINY)
def test_round_trip(tmp_path, name, tied):
    spec = replace(preset(name), tie_embeddings=tied)
    params = random_params(spec, seed=3)
    for dtype in (torch.float32, torch.bfloat16):
        folder = tmp_path / str(dtype)
        size = save(folder, spec, params, dtype)
        assert size == sum(value.nbytes for value in load_file(folder / "model.safetensors").values())
        found, loaded = load(folder, dtype=dtype)
        assert replace(found, name=name) == spec and loaded.keys() == params.keys()
        for key, value in params.items():
            wanted = value if key.startswith("rope") else value.to(param_dtype(key, dtype))
            assert torch.equal(loaded[key], wanted), key


@pytest.mark.parametrize("name", TINY)
def test_transformers_reads_it(tmp_path, name):
    import transformers

    spec = preset(name)
    params = random_params(spec, seed=5)
    save(tmp_path, spec, params, torch.float32)
    _, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert any(key.endswith(INTEGER_NAMES) for key in params) == (name == "tiny_v4")


def test_missing_and_misshaped_weights_are_named(tmp_path):
    spec = tiny_v32()
    params = random_params(spec, seed=1)
    with pytest.raises(ValueError, match="weight layers.0.attn.w_uk: got shape"):
        save(tmp_path, spec, params | {"layers.0.attn.w_uk": torch.zeros(2, 3, 4)})
    del params["layers.1.index.k"]
    with pytest.raises(ValueError, match="weight layers.1.index.k: missing"):
        save(tmp_path, spec, params)


def _sharded(folder, spec, params):
    """A checkpoint of three shards, of two tensors that go into one and the rest."""
    save(folder, spec, params, torch.float32)
    tensors = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    names = [f"model-{shard:05}-of-00003.safetensors" for shard in (1, 2, 3)]
    home = {tensor: names[place % 3] for place, tensor in enumerate(sorted(tensors))}
    for name in names:
        save_file({tensor: tensors[tensor] for tensor in home if home[tensor] == name}, folder / name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": home}))
    save_file({"logits": torch.ones(2)}, folder / "logits.safetensors")
    return spec, params


def _holds(folder, spec, params):
    found, loaded = load(folder, dtype=torch.float32)
    assert replace(found, name=spec.name) == spec
    assert all(torch.equal(loaded[key], value) for key, value in params.items())


OTHER = replace(tiny_v32(), num_layers=1, moe_layers=(False,), index_layers=(True,))


@pytest.mark.parametrize("old", ["sharded", "whole", "none"])
def test_a_save_is_whole_or_not_at_all(tmp_path, monkeypatch, old):
    """A failure is put into each renaming, link and sync in turn; the checkpoint is the old one until one save is
    through."""
    before, after = random_params(OTHER, seed=1), random_params(spec := replace(OTHER, rms_eps=3e-6), seed=2)
    if old == "sharded":
        _sharded(tmp_path, OTHER, before)
    elif old == "whole":
        save(tmp_path, OTHER, before, torch.float32)
    names = sorted(path.name for path in tmp_path.iterdir())
    failures = 0
    for call in ("open", "fsync", "chmod", "link", "replace", "save_file"):
        for place in range(8):
            count = iter(range(100))
            holder, name = (safetensors.torch, call) if call == "save_file" else (files.os, call)
            real = getattr(holder, name)

            def failing(*args, **kwargs):
                if next(count) == place:
                    raise OSError(28, "injected")
                return real(*args, **kwargs)

            with monkeypatch.context() as patch:
                patch.setattr(holder, name, failing)
                try:
                    save(tmp_path / "copy" if old == "none" else tmp_path, spec, after, torch.float32)
                except OSError:
                    failures += 1
                    assert sorted(path.name for path in tmp_path.iterdir()) == names
                    if old != "none":
                        _holds(tmp_path, OTHER, before)
                    continue
            break  # all of this call's places have failed, or it has another way
        else:
            continue
        if old == "none":
            _holds(tmp_path / "copy", spec, after)
            shutil.rmtree(tmp_path / "copy")
            continue
        _holds(tmp_path, spec, after)
        left = {"config.json", "model.safetensors"} | ({"logits.safetensors"} if old == "sharded" else set())
        assert {path.name for path in tmp_path.iterdir()} == left
        if old == "sharded":
            _sharded(tmp_path, OTHER, before)
        else:
            save(tmp_path, OTHER, before, torch.float32)
    assert failures >= 8


@pytest.mark.parametrize("place", ("fsync", "write_text"))
def test_a_full_disk_is_named_by_file(tmp_path, monkeypatch, place):
    """Errors of the system that come from an open file name none."""

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(*((files.os, place) if place == "fsync" else (Path, place)), full)
    last = place == "write_text"
    for write, name in (
        (lambda: save(tmp_path / "a", OTHER, random_params(OTHER, seed=1)), "config.json" if last else "model.safetensors"),
        (lambda: write_published(tmp_path / "a", OTHER, "bf16"), "model.safetensors.index.json" if last else "model-00001"),
    ):  # fmt: skip
        with pytest.raises(OSError, match="No space left on device: '.*/a/" + name):
            write()
    assert not (tmp_path / "a").exists()


def test_saved_files_are_as_readable_as_others(tmp_path):
    umask = os.umask(0o022)
    try:
        save(tmp_path, OTHER, random_params(OTHER, seed=1))
    finally:
        os.umask(umask)
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o644}


def test_whoever_reads_during_a_save_finds_no_new_config_beside_old_weights(tmp_path, monkeypatch):
    before, after = random_params(OTHER, seed=1), random_params(spec := replace(OTHER, rms_eps=3e-6), seed=2)
    _sharded(tmp_path, OTHER, before)
    real, seen = os.replace, []

    def watching(source, target):
        real(source, target)
        found, loaded = load(tmp_path, dtype=torch.float32)
        seen.append((found.rms_eps == spec.rms_eps, torch.equal(loaded["embed"], after["embed"])))

    monkeypatch.setattr(files.os, "replace", watching)
    save(tmp_path, spec, after, torch.float32)
    assert seen == [(False, True), (True, True)]


def test_an_index_that_cannot_be_read_goes_and_wild_names_in_it_do_not(tmp_path):
    params = random_params(OTHER, seed=1)
    victim = tmp_path / "victim.safetensors"
    victim.write_text("")
    folder = tmp_path / "model"
    for index in ("nonsense", json.dumps({"weight_map": {"a": "../victim.safetensors"}}), "[]"):
        folder.mkdir(exist_ok=True)
        (folder / "model.safetensors.index.json").write_text(index)
        save(folder, OTHER, params)
        assert (
            sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"] and victim.exists()
        )
