"""Every tensor of published files, damaged: missing, of another shape, of another dtype, not a number."""

from __future__ import annotations

import math
import os
import random
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from sparse_attn.checkpoints.load import load
from sparse_attn.checkpoints.published import write_published
from sparse_attn.spec import preset

SOME = 16  # of each form; all of them with SPARSE_ATTN_LONG=1
E8M0, E4M3 = torch.float8_e8m0fnu, torch.float8_e4m3fn
FORMS = [("tiny_v4", "published"), ("tiny_v4", "flash-base"), ("tiny_v4", "fp8-e8m0"), ("tiny_v32", "published"),
         ("tiny_v32", "fused"), ("tiny_glm5", "published")]  # fmt: skip
# What stays one reading: fp4 codes as bytes, and scales of linear layers as numbers or as exponents, unless the config
# says otherwise.
READABLE = {"bytes of codes", "scales as numbers", "scales as exponents"}


def damages(value):
    yield "gone", None
    yield "a row less", value[:-1].contiguous() if value.dim() else value.repeat(2)
    yield "flat bytes", value.contiguous().view(-1).view(torch.uint8)
    if value.dtype == E8M0:
        yield "bytes of scales", value.view(torch.uint8)
        yield "scales as numbers", value.float()
    elif value.dtype == torch.int8:
        yield "bytes of codes", value.view(torch.uint8)
        yield "codes as numbers", value.float()
    elif value.dtype == E4M3:
        yield "bytes of values", value.view(torch.uint8)
        yield "values without their scales", value.float()
    elif value.dtype == torch.float32:
        yield "scales as exponents", torch.ones_like(value).to(E8M0)
    elif value.dtype == torch.bfloat16:
        yield "fp8 without scales", value.to(E4M3)
    if value.dtype.is_floating_point and value.dtype != E8M0:
        broken = value.clone()
        broken.view(-1)[0] = math.nan
        yield "NaN", broken


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name,form", FORMS)
def test_a_damaged_tensor_is_an_error_that_names_weight_and_file(name, form, tmp_path):
    whole, one, tensors = tmp_path / "whole", tmp_path / "one", {}
    write_published(whole, preset(name), form, seed=1)
    for path in whole.glob("*.safetensors"):
        tensors |= load_file(path)
    kinds = {f"{re.sub(r'[0-9]+', '#', key)} {value.dtype}": key for key, value in tensors.items()}
    cases = [(key, *damage) for key in kinds.values() for damage in damages(tensors[key])]
    if os.environ.get("SPARSE_ATTN_LONG", "0") in ("", "0"):
        cases = random.Random(5).sample(cases, SOME)
    one.mkdir()
    shutil.copy(whole / "config.json", one)
    for key, what, value in cases:
        changed = {other: tensors[other] for other in tensors if other != key} | ({} if value is None else {key: value})
        save_file(changed, one / "model.safetensors")
        try:
            load(one, mtp=form != "fused")
        except ValueError as error:
            assert "weight " in str(error) and (str(one) in str(error)), (key, what, error)
        else:
            assert what in READABLE, (key, what)
