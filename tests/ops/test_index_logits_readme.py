"""ops/indexer/scores/hopper/README.md against the compiled kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.index_logits import paged_arguments, prefill_arguments
from support.warp_specialised import documented, kernel_of, sections

from sparse_attn.ops.indexer import scores

README = Path(scores.__file__).parent / "hopper" / "README.md"


def test_every_hopper_kernel_has_its_page():
    from sparse_attn.ops.indexer.scores.dispatch import PAGED_KERNELS, PREFILL_KERNELS

    names = {kernel.name for kernel in (*PREFILL_KERNELS, *PAGED_KERNELS) if kernel.name.startswith("hopper.")}
    assert set(sections(README)) == names


@pytest.mark.aot
@pytest.mark.parametrize(
    "name",
    [
        "hopper.prefill",
        "hopper.paged",
        pytest.param("hopper.prefill_mxfp4", marks=pytest.mark.few(0)),
        pytest.param("hopper.paged_mxfp4", marks=pytest.mark.few(0)),
    ],
)
def test_tables_are_those_of_the_compiled_kernel(name):
    """Of 64 heads, and four rows a request."""
    from sparse_attn.ops.indexer.scores import launch
    from sparse_attn.testing.launches import compile_launch, recording

    with recording("sm_90") as launches:
        flavour = "mxfp4" if name.endswith("mxfp4") else "e4m3fn"
        if name.startswith("hopper.prefill"):
            launch.mqa_logits(*prefill_arguments(90, 700, flavour=flavour), kernel=name)
        else:
            launch.paged_mqa_logits(*paged_arguments(90, 4, max_context_len=900, flavour=flavour), kernel=name)
    found, (wanted, barriers) = kernel_of(compile_launch(launches[0])), documented(sections(README)[name])
    # Barriers of common.py, or of mxfp4.py.
    own = ["full", "ready", "empty", "q_ready"]
    assert barriers == (own if flavour == "mxfp4" else ["full", "empty", "q_full", "q_empty"])
    assert wanted == found
