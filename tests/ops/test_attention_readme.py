"""ops/attention/sparse/hopper/README.md against the compiled kernels."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import triton
from support.warp_specialised import documented, kernel_of, of_form, sections

from sparse_attn.ops.attention import sparse

README = Path(sparse.__file__).parent / "hopper" / "README.md"
SCRIPTS = Path(__file__).parents[2] / "scripts"
BF16, INT32 = torch.bfloat16, torch.int32


class Form(NamedTuple):
    """A case of scripts/aot_cases, or (heads, columns) of bf16 rows; what README calls it; its places among the values
    of a cell: of roles and barriers, and of memory; bytes that Triton takes beside."""

    kernel: str
    case: str | tuple[int, int]
    name: str
    place: int
    memory_place: int
    more: int = 0


V32, V4 = "sparse_attn_decode: deepseek_v32 fp8, batch ", "sparse_attn_decode: deepseek_v4, batch "
FORMS = [
    Form("hopper.prefill_bf16", "sparse_attn_prefill: deepseek_v32 bfloat16", "d_qk 576", 0, 0),
    Form("hopper.prefill_bf16", "sparse_attn_prefill: deepseek_v4_pro bfloat16", "d_qk 512", 1, 1),
    Form("hopper.decode_fp8", V32 + "128, 128 heads", "656 bytes", 0, 0),
    Form("hopper.decode_fp8", V32 + "4, 128 heads", "656 bytes", 0, 0, more=16),  # of split rows
    Form("hopper.decode_fp8", V4 + "128, 128 heads", "584 bytes", 1, 1),
    Form("hopper.decode_fp8", V4 + "4, 64 heads", "584 bytes", 1, 1, more=16),
    Form("hopper.swap_ab", (16, 576), "576 columns", 0, 0),
    Form("hopper.swap_ab", (32, 576), "576 columns", 0, 1),
    Form("hopper.swap_ab", (16, 512), "512 columns", 0, 0),
    Form("hopper.swap_ab", (32, 512), "512 columns", 0, 1),
    Form("hopper.swap_ab", V32 + "128, 16 heads", "656 bytes", 1, 0),
    Form("hopper.swap_ab", V32 + "64, 32 heads", "656 bytes", 2, 1),
    Form("hopper.swap_ab", V4 + "128, 16 heads", "584 bytes", 1, 0),
    Form("hopper.swap_ab", V4 + "64, 32 heads", "584 bytes", 2, 1),
    Form("hopper.swap_ab", V32 + "1, 128 heads", "656 bytes", 2, 1),
    Form("hopper.swap_ab", V4 + "1, 64 heads", "584 bytes", 2, 1),
]
SEESAW = [f"k_{state}[{half}]" for state in ("full", "empty") for half in ("K0L", "K0R", "K1L", "K1R")]
SEESAW += ["max0_full", "max1_full", "p0_full", "p1_full", "q_full", "q_empty"]
BARRIERS = {  # of seesaw.py and swap_ab_load.py, in the order of allocation; decode_fp8 reads its queries once
    "hopper.prefill_bf16": SEESAW,
    "hopper.decode_fp8": SEESAW[:-1],
    "hopper.swap_ab": ["k_full", "k_empty", "codes_full", "codes_empty"],
}


def test_every_hopper_kernel_has_its_page():
    from sparse_attn.ops.attention.sparse.dispatch import KERNELS

    names = {kernel.name for kernel in KERNELS if kernel.name.startswith("hopper.")}
    assert set(sections(README)) == names == {form.kernel for form in FORMS}


def launch(case):
    """Launch ``case`` of tensors on the meta device."""
    from aot_cases import all_cases

    from sparse_attn.ops.attention.sparse.launch import sparse_attn_prefill

    if isinstance(case, str):
        found = next(one for one in all_cases() if f"{one.op}: {one.name}" == case)
        return found.launcher(*found.arguments)
    (heads, columns), like = case, dict(device="meta")
    q, rows = torch.empty(2048, heads, columns, dtype=BF16, **like), torch.empty(65536, columns, dtype=BF16, **like)
    indices, indptr = torch.empty(2048 * 2048, dtype=INT32, **like), torch.empty(2049, dtype=INT32, **like)
    return sparse_attn_prefill(q, rows, indices, indptr, 0.1, 512, None)


@pytest.mark.aot
@pytest.mark.parametrize("form", FORMS, ids=lambda form: f"{form.kernel}, {form.case}")
def test_tables_are_those_of_the_compiled_kernel(form, monkeypatch):
    from sparse_attn.testing.launches import compile_launch, recording

    monkeypatch.syspath_prepend(str(SCRIPTS))
    with recording("sm_90") as launches:
        launch(form.case)
    (noted,) = [one for one in launches if one.module.endswith(form.kernel)]
    found, tables = kernel_of(compile_launch(noted)), sections(README)[form.kernel]
    memory = of_form(tables[-1:], {form.name}, form.memory_place)
    wanted, barriers = documented(of_form(tables[:-1], {form.name}, form.place) + memory)
    wanted = wanted._replace(shared_memory=wanted.shared_memory + form.more)
    if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8) and found.shared_memory < wanted.shared_memory:
        wanted = wanted._replace(shared_memory=found.shared_memory)  # Triton's own is less, where it is not the same
    assert wanted == found
    assert barriers == BARRIERS[form.kernel][: len(barriers)] and len(barriers) == len(found.barriers)
