"""Bugs of the experts of fp8 rows on Hopper, whose PTX is executed on a CPU."""

from mutations.mutation import OPS, Mutation

KERNELS = OPS + "experts/hopper/kernels.py"
PRODUCT = ("tests/test_ptx_experts.py::test_product",)

# fmt: off
EXPERTS = [
    Mutation(
        "experts-ups-of-the-first-box", "ups are read where gates are",
        KERNELS,
        "tma_load(codes, [expert, first + tiles.second, word]",
        "tma_load(codes, [expert, first, word]",
        PRODUCT,
    ),
    Mutation(
        "experts-scales-in-order-of-lanes", "the scales of a warp's outputs are those of sixteen neighbours",
        KERNELS,
        "own = which * OWN + m // 16 * 8 + m % 8 + m // 8 % 2 * tiles.second",
        "own = which * OWN + m",
        PRODUCT,
    ),
    Mutation(
        "experts-last-row-left-out", "the last row of an expert's is left out",
        KERNELS,
        "(at < end)",
        "(at < end - 1)",
        PRODUCT,
    ),
    Mutation(
        "experts-rows-of-the-one-before", "a tile stores the last rows of the expert before",
        KERNELS,
        "    inside = (at >= row) & (at < end)\n",
        "    inside = at < end\n",
        PRODUCT,
    ),
    Mutation(
        "experts-scales-from-any-address", "a tile begins at its first row, whose scale may lie at any address",
        KERNELS,
        "        row = row // ALIGN * ALIGN\n",
        "",
        PRODUCT,
    ),
    Mutation(
        "experts-tiles-too-few", "tiles begin at an expert's first row, and their last rows are nobody's",
        OPS + "experts/grouped/kernels.py",
        "tl.maximum(first // ALIGN * ALIGN + (n - tile) * BLOCK_M, first)",
        "first + (n - tile) * BLOCK_M",
        ("tests/test_experts.py::test_sorted_rows_and_their_tiles",),
        interpreted=True,
    ),
    Mutation(
        "experts-scale-of-the-step-before", "a step's scales are those of the step before",
        KERNELS,
        "gl.minimum(step + 3, last) * 4",
        "gl.minimum(step + 2, last) * 4",
        PRODUCT,
    ),
    Mutation(
        "experts-far-groups-wrapped", "a group far below the highest of four is taken for one above it",
        KERNELS,
        "    there = up >= DOWN\n",
        "    there = up >= -128\n",
        ("tests/test_ptx_experts.py::test_scales_that_lie_apart",),
    ),
    Mutation(
        "experts-emptied-early", "a stage is emptied while its rows are multiplied",
        KERNELS,
        "        product = warpgroup_mma_wait(0, deps=(product,))\n        signal(shared.empty.index(stage))\n",
        "        signal(shared.empty.index(stage))\n        product = warpgroup_mma_wait(0, deps=(product,))\n",
        PRODUCT,
    ),
    Mutation(
        "experts-ring-begun-anew", "each tile begins its ring at the first stage",
        KERNELS,
        "        first = unit % tiles.outputs * tiles.EACH\n        weight_row",
        "        stage, phase = 0, 0\n        first = unit % tiles.outputs * tiles.EACH\n        weight_row",
        PRODUCT,
    ),
    Mutation(
        "experts-weight-of-the-sorted-row", "a term is weighed as the row at its sorted place",
        KERNELS,
        "gl.load(output.weights + to, mask",
        "gl.load(output.weights + at, mask",
        PRODUCT,
    ),
    Mutation(
        "experts-scale-of-the-next-step", "a product is scaled by what is left of the next step's scales",
        KERNELS,
        "            left = left_ahead\n            low, high, left_ahead = _tables(ahead, EXACT, RESULT)\n",
        "            low, high, left_ahead = _tables(ahead, EXACT, RESULT)\n            left = left_ahead\n",
        PRODUCT,
    ),
    Mutation(
        "experts-spans-of-a-block-over-another", "spans that are kept of a second block take the place of the first's",
        OPS + "experts/hopper/rows.py",
        "        found += tl.sum(held.to(tl.int32), 0)\n",
        "        found = tl.sum(held.to(tl.int32), 0)\n",
        ("tests/test_experts.py::test_sorted_rows_and_their_tiles",),
        interpreted=True,
    ),
    Mutation(
        "experts-exact-pairs-turned", "halves of a word change places in an operand of bf16",
        "sparse_attn/device/mxfp4_operand.py",
        "gl.permute(pairs, (0, 2, 4, 3, 1))",
        "gl.permute(pairs, (0, 2, 3, 4, 1))",
        PRODUCT,
    ),
    Mutation(
        "experts-inner-values-in-order", "inner values of bf16 lie as outputs do",
        KERNELS,
        "        column = column // 128 * 128 + column % 32",
        "        column = column * 1 + 0 * column % 32",
        PRODUCT,
    ),
    Mutation(
        "experts-rows-sorted-in-order", "sorted rows keep the order of their columns",
        OPS + "experts/hopper/rows.py",
        "[0, 2, 3, 1, 4])",
        "[0, 1, 2, 3, 4])",
        ("tests/test_experts.py::test_rows_sorted_for_the_streamed_kernel",),
        interpreted=True,
    ),
    Mutation(
        "experts-rows-of-another-token", "a sorted row is quantised as the token of its number",
        OPS + "grouped_linear/fp8/kernels.py",
        "token = tl.load(order + row, mask=inside, other=0) // k",
        "token = tl.load(order + row, mask=inside, other=0)",
        ("tests/test_grouped_linear_fp8.py::test_kernel_quantises_as_the_reference_does",),
        interpreted=True,
    ),
]
