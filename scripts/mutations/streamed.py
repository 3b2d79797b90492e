"""Bugs of the linear of few rows on Hopper, whose PTX is executed on a CPU."""

from mutations.mutation import OPS, Mutation

KERNELS, STREAM, WIDE = (OPS + f"layers/products/hopper/{name}.py" for name in ("stream_k", "stream", "stream_k_wide"))

# fmt: off
STREAMED = [
    Mutation(
        "streamed-slot-of-the-first-tile", "partials of a tile that a CTA begins are looked for where its first tile has them",
        STREAM,
        "gl.where(cta + n == first, second, 0)",
        "second * 0",
        ("tests/ops/test_ptx_products.py::test_stream_k",),
    ),
    Mutation(
        "streamed-arrivals-off-by-one", "the last CTA of a tile but one adds up its partials",
        STREAM,
        "== last - first:",
        "== last - first - 1:",
        ("tests/ops/test_ptx_products.py::test_stream_k",),
    ),
    Mutation(
        "streamed-outputs-in-place", "scales of outputs are taken in the order of lanes",
        KERNELS,
        "    return (m & (OUTPUTS - 8)) | ((m & 1) << 2) | ((m >> 1) & 3)",
        "    return m",
        ("tests/ops/test_ptx_products.py::test_stream_k_of_a_cut_weight",),
    ),
    Mutation(
        "streamed-scale-of-another-block", "the scale of a block of columns is that of the block before",
        KERNELS,
        "gl.minimum(step + 1, end - 1) * BLOCK_K // scales.BLOCK_COLUMNS",
        "step * BLOCK_K // scales.BLOCK_COLUMNS",
        ("tests/ops/test_ptx_products.py::test_stream_k",),
    ),
    Mutation(
        "streamed-rows-of-the-first-step", "rows that wait for the launch before are those of the tile's first columns",
        STREAM,
        "tma_load(rows, [0, step % run.steps * BLOCK_K], shared",
        "tma_load(rows, [0, 0 * step], shared",
        ("tests/ops/test_ptx_products.py::test_stream_k",),
    ),
    Mutation(
        "streamed-nan-unseen", "NaN is looked for in half of the words",
        KERNELS,
        "    one, other = gl.split(one | other)\n    one, other = gl.split(one | other)\n",
        "    one, other = gl.split(one)\n    one, other = gl.split(one | other)\n",
        ("tests/ops/test_ptx_products.py::test_stream_k_with_nan_in_a_code",),
    ),
    Mutation(
        "streamed-wide-pairs-turned", "the codes of a pair change places in a wide product",
        WIDE,
        "prmt.b32 a, $2, $2, 0x9180;",
        "prmt.b32 a, $2, $2, 0x8091;",
        ("tests/ops/test_ptx_products.py::test_stream_k_wide",),
    ),
    Mutation(
        "streamed-wide-stored-in-place", "outputs of a wide product are stored in another order",
        WIDE,
        "IN_ORDER = gl.constexpr((1, 2, 3))",
        "IN_ORDER = gl.constexpr((2, 3, 1))",
        ("tests/ops/test_ptx_products.py::test_stream_k_wide",),
    ),
    Mutation(
        "streamed-long-run-in-half-a-ring", "a long run begins its ring behind half of it, with codes in all of it",
        STREAM,
        "    stage, phase = early % STAGES, early // STAGES\n",
        "    stage, phase = (STAGES + 1) // 2, 0\n",
        ("tests/ops/test_ptx_products.py::test_stream_k",),
    ),
    Mutation(
        "streamed-partials-of-both", "both consumers leave their partials in one place",
        STREAM,
        "output.partials + which * OUTPUTS * BLOCK_M + ",
        "output.partials + ",
        ("tests/ops/test_ptx_products.py::test_stream_k",),
    ),
    Mutation(
        "streamed-wide-emptied-early", "a stage is emptied while its rows are multiplied",
        WIDE,
        "            product = warpgroup_mma_wait(0, deps=(product,))\n            signal(shared.empty.index(stage))\n",
        "            signal(shared.empty.index(stage))\n            product = warpgroup_mma_wait(0, deps=(product,))\n",
        ("tests/ops/test_ptx_products.py::test_stream_k_wide",),
    ),
    Mutation(
        "streamed-wide-nan-of-even-codes", "NaN is looked for in the first code of a pair",
        WIDE,
        "FLAG = gl.constexpr(0x08000800)",
        "FLAG = gl.constexpr(0x00000800)",
        ("tests/ops/test_ptx_products.py::test_stream_k_wide_with_nan_in_a_code",),
    ),
    Mutation(
        "streamed-wide-nan-of-half-the-columns", "NaN is looked for in half of the pairs",
        WIDE,
        "        flags = one | other\n",
        "        flags = one\n",
        ("tests/ops/test_ptx_products.py::test_stream_k_wide_with_nan_in_a_code",),
    ),
    Mutation(
        "streamed-wide-rows-of-the-first-launch", "every launch multiplies the rows of the first",
        OPS + "layers/products/problem.py",
        "self._replace(rows=rows,",
        "self._replace(rows=self.rows[: rows.shape[0]],",
        ("tests/ops/test_ptx_products.py::test_stream_k_wide",),
    ),
]
