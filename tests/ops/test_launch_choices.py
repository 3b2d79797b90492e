"""What is launched for which shape, as tables to read: a change of theirs wants a new run on the GPU they are for."""

from __future__ import annotations

import torch
from expecttest import assert_expected_inline
from support.index_logits import U8, paged_problem, prefill_problem

from sparse_attn.framework.target import H200
from sparse_attn.layout import LatentFp8Layout, PlainLayout
from sparse_attn.ops.attention.sparse import dispatch as attention
from sparse_attn.ops.attention.sparse.portable import config as portable
from sparse_attn.ops.attention.sparse.problem import packed_decode, packed_prefill
from sparse_attn.ops.indexer.scores import dispatch as scores
from sparse_attn.ops.indexer.scores.plan import PrefillPlan
from sparse_attn.ops.layers.products import dispatch as products
from sparse_attn.ops.layers.products.problem import Problem as Product
from sparse_attn.ops.topk.select import dispatch as topk
from sparse_attn.ops.topk.select.plan import Problem
from sparse_attn.testing.launches import TARGETS

LATENT, ROWS = LatentFp8Layout(512, 64), PlainLayout("bf16", 512, 64)
CACHES = (
    ("fp32", 4, False, False, False), ("bf16", 2, False, False, False), ("bf16, apart", 2, False, False, True),
    ("fp8", 2, True, False, False), ("bf16 and fp8", 2, False, True, False),
)  # fmt: skip
COUNTS = (1, 2, 8, 33, 64, 66, 67)


def table(head, *rows):
    """Lines of columns as wide as their widest entry."""
    lines = [[str(entry) for entry in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*lines)]
    return "\n".join("  ".join(f"{entry:<{width}}" for entry, width in zip(line, widths)).rstrip() for line in lines)


def tile(launch):
    return f"{launch.block_m}x{launch.block_n} {launch.num_warps}w {launch.num_stages}s{'' if launch.hoist else ' unhoisted'}"


def test_portable_attention():
    """Heads x keys of a tile, warps, stages."""
    rows = []
    for name, target in TARGETS.items():
        for heads in (8, 32, 128):
            tiles = [
                tile(portable.fitting(heads, 576, 512, size, fp8, mixed, apart, target)[0])
                for _, size, fp8, mixed, apart in CACHES
            ]
            rows.append((name, heads, *tiles))
    assert_expected_inline(
        table(("target", "heads", *(name for name, *_ in CACHES)), *rows),
        """\
target  heads  fp32         bf16                   bf16, apart            fp8                    bf16 and fp8
sm_80   8      16x16 4w 1s  16x64 8w 2s            16x64 8w 2s            16x64 8w 2s            16x64 8w 2s
sm_80   32     16x16 4w 1s  32x32 8w 2s            32x32 8w 2s            16x64 8w 2s            16x64 8w 2s
sm_80   128    16x16 4w 1s  64x32 8w 2s            64x32 8w 2s            16x64 8w 2s            16x64 8w 2s
sm_86   8      16x16 4w 1s  16x32 8w 2s            16x32 8w 2s            16x32 8w 2s            16x32 8w 2s
sm_86   32     16x16 4w 1s  32x16 8w 2s            32x16 8w 2s            16x32 8w 2s            16x32 8w 2s
sm_86   128    16x16 4w 1s  32x16 8w 2s            32x16 8w 2s            16x32 8w 2s            16x32 8w 2s
sm_89   8      16x16 4w 1s  16x32 8w 2s            16x32 8w 2s            16x32 8w 2s            16x32 8w 2s
sm_89   32     16x16 4w 1s  32x16 8w 2s            32x16 8w 2s            16x32 8w 2s            16x32 8w 2s
sm_89   128    16x16 4w 1s  32x16 8w 2s            32x16 8w 2s            16x32 8w 2s            16x32 8w 2s
sm_90   8      16x16 4w 1s  16x64 8w 2s            16x64 8w 2s            16x64 8w 2s            16x64 8w 2s
sm_90   32     16x16 4w 1s  32x64 8w 2s            32x64 8w 2s            32x64 8w 2s            32x64 8w 2s
sm_90   128    16x16 4w 1s  64x64 8w 2s            64x64 8w 2s unhoisted  64x64 8w 3s            64x64 8w 2s
sm_100  8      16x16 4w 1s  16x64 8w 2s            16x64 8w 2s            16x64 8w 2s            16x64 8w 2s
sm_100  32     16x16 4w 1s  32x64 8w 2s            32x64 8w 2s            16x64 8w 2s            32x64 8w 2s
sm_100  128    16x16 4w 1s  64x32 8w 2s unhoisted  64x32 8w 2s unhoisted  64x64 8w 3s unhoisted  64x32 8w 2s unhoisted
sm_120  8      16x16 4w 1s  16x32 8w 2s            16x32 8w 2s            16x32 8w 2s            16x32 8w 2s
sm_120  32     16x16 4w 1s  32x16 8w 2s            32x16 8w 2s            16x32 8w 2s            16x32 8w 2s
sm_120  128    16x16 4w 1s  32x16 8w 2s            32x16 8w 2s            16x32 8w 2s            16x32 8w 2s
gfx942  8      16x16 4w 1s  16x16 8w 2s            16x16 8w 2s            16x16 8w 2s            16x16 8w 2s
gfx942  32     16x16 4w 1s  32x16 4w 2s            32x16 4w 2s            32x16 4w 2s            32x16 4w 2s
gfx942  128    16x16 4w 1s  64x16 4w 2s            64x16 4w 2s            32x16 4w 2s            32x16 4w 2s
gfx950  8      16x16 4w 1s  16x32 4w 2s            16x32 4w 2s            16x16 4w 2s            16x16 4w 2s
gfx950  32     16x16 4w 1s  32x32 4w 2s            32x32 4w 2s            32x16 4w 2s            32x16 4w 2s
gfx950  128    16x16 4w 1s  64x32 4w 2s            64x32 4w 2s            64x16 4w 2s            64x16 4w 2s""",
    )


def test_attention_of_few_rows():
    """Programs that share a row of 2048 keys of 576 values, by the portable kernel."""
    rows = [
        (name, *(portable.plan(packed_decode(count, 128, LATENT, count * 2048), target).splits for count in COUNTS))
        for name, target in TARGETS.items()
    ]
    assert_expected_inline(
        table(("target", *COUNTS), *rows),
        """\
target  1    2   8   33  64  66  67
sm_80   13   6   1   1   1   1   1
sm_86   10   5   1   1   1   1   1
sm_89   17   8   2   1   1   1   1
sm_90   32   32  8   2   1   1   1
sm_100  32   32  9   2   1   1   1
sm_120  23   11  2   1   1   1   1
gfx942  76   38  9   2   1   1   1
gfx950  128  64  16  3   2   1   1""",
    )


def test_attention_on_hopper():
    """Of rows of 2048 keys: registers, and how often a row is split."""
    rows = []
    for tokens in (1, 8, 22, 32, 44, 66, 67, 128, 133, 4096):
        prefill = [packed_prefill(tokens, heads, ROWS, tokens * 2048) for heads in (64, 128)]
        decode = [packed_decode(tokens, heads, LATENT, tokens * 2048) for heads in (64, 128)]
        few = [packed_decode(tokens, heads, layout, tokens * 2048) for layout in (ROWS, LATENT) for heads in (16, 32)]
        rows.append((tokens, *(waves(attention.choose(problem, H200)) for problem in (*prefill, *decode, *few))))
    head = ("bf16 64", "bf16 128", "fp8 64", "fp8 128", "bf16 16", "bf16 32", "fp8 16", "fp8 32")
    assert_expected_inline(
        table(("rows", *head), *rows),
        """\
rows  bf16 64  bf16 128  fp8 64        fp8 128       bf16 16       bf16 32       fp8 16        fp8 32
1     1x32     1x32      1x32          1x32          1x32          1x32          1x32          1x32
8     -        -         8x16          8x8           8x16          8x16          8x16          8x16
22    -        whole     22x6          22x3          22x6          22x6          22x6          22x6
32    -        whole     32x4          32x2          32x4          32x4          32x4          32x4
44    whole    whole     44x3          33x2 + 11x6   44x3          44x3          44x3          44x3
66    whole    whole     66x2          66x1          66x2          66x2          66x2          66x2
67    whole    whole     66x2 + 1x16   66x1 + 1x16   66x2 + 1x32   66x2 + 1x32   66x2 + 1x32   66x2 + 1x32
128   whole    whole     128x1         128x1         128x1         128x1         128x1         128x1
133   whole    whole     132x1 + 1x16  132x1 + 1x16  132x1 + 1x32  132x1 + 1x32  132x1 + 1x32  132x1 + 1x32
4096  whole    whole     4096x1        4096x1        4096x1        4096x1        4096x1        4096x1""",
    )
    registers = [
        (form, choice.kernel.name, getattr(choice.plan, "consumer_registers", "the rest"), choice.plan.producer_registers,
         getattr(choice.plan, "loader_registers", "-"))
        for form, heads, layout in (("bf16, 128", 128, ROWS), ("fp8, 128", 128, LATENT), ("bf16, 16", 16, ROWS),
                                    ("fp8, 16", 16, LATENT), ("fp8, 32", 32, LATENT))
        for choice in [attention.choose(packed_decode(64, heads, layout, 64 * 2048), H200)]
    ]  # fmt: skip
    assert_expected_inline(
        table(("keys, heads", "kernel", "consumer", "producer", "loader"), *registers),
        """\
keys, heads  kernel               consumer  producer  loader
bf16, 128    hopper.prefill_bf16  216       72        -
fp8, 128     hopper.decode_fp8    192       64        -
bf16, 16     hopper.swap_ab       the rest  136       96
fp8, 16      hopper.swap_ab       the rest  112       96
fp8, 32      hopper.swap_ab       the rest  104       80""",
    )


def waves(choice):
    """rows x splits of every launch."""
    if choice.kernel.name in ("portable", "hopper.prefill_bf16"):
        return "-" if choice.kernel.name == "portable" else "whole"
    return " + ".join(f"{some.rows}x{some.splits}" for some in choice.plan.waves)


def test_index_scores():
    """Keys of a tile, rows of a program (of prefill), warps, stages, programs of a request (of decode, 32 requests)."""
    rows = []
    for name, target in TARGETS.items():
        for kind, dtype in (("e4m3fn", U8), ("e4m3fnuz", U8), ("none", torch.bfloat16), ("none", torch.float32)):
            prefill = scores.choose_prefill(prefill_problem(4096, 32768, 64, 128, kind, dtype), target)
            decode = [
                scores.choose_paged(paged_problem(32, next_n, 64, 128, 32768, kind, dtype), target) for next_n in (1, 2)
            ]
            rows.append((name, f"{kind}, {dtype.itemsize} B", *map(scoring, (prefill, *decode))))
    assert_expected_inline(
        table(("target", "queries", "prefill", "decode, 1 row", "decode, 2 rows"), *rows),
        """\
target  queries        prefill                  decode, 1 row            decode, 2 rows
sm_80   e4m3fn, 1 B    128 64 rows 8w 2s        128 /13 4w 2s            64 /13 8w 2s
sm_80   e4m3fnuz, 1 B  128 64 rows 8w 2s        128 /13 4w 2s            64 /13 8w 2s
sm_80   none, 2 B      128 64 rows 8w 2s        128 /13 4w 2s            64 /13 8w 2s
sm_80   none, 4 B      32 16 rows 8w 1s         32 /13 8w 1s             16 /13 8w 1s
sm_86   e4m3fn, 1 B    128 64 rows 8w 2s        128 /10 4w 2s            64 /10 8w 2s
sm_86   e4m3fnuz, 1 B  128 64 rows 8w 2s        128 /10 4w 2s            64 /10 8w 2s
sm_86   none, 2 B      128 64 rows 8w 2s        128 /10 4w 2s            64 /10 8w 2s
sm_86   none, 4 B      32 16 rows 8w 1s         32 /10 8w 1s             16 /10 8w 1s
sm_89   e4m3fn, 1 B    128 64 rows 4w 3s fp8    64 /26 4w 3s fp8         64 /26 4w 3s fp8
sm_89   e4m3fnuz, 1 B  128 64 rows 8w 2s        128 /17 4w 2s            64 /17 8w 2s
sm_89   none, 2 B      128 64 rows 8w 2s        128 /17 4w 2s            64 /17 8w 2s
sm_89   none, 4 B      32 16 rows 8w 1s         32 /17 8w 1s             16 /17 8w 1s
sm_90   e4m3fn, 1 B    hopper 4 rows, 8 stages  hopper 1 rows, 8 stages  hopper 2 rows, 8 stages
sm_90   e4m3fnuz, 1 B  128 64 rows 8w 2s        128 /16 4w 2s            64 /16 4w 2s
sm_90   none, 2 B      128 64 rows 8w 2s        128 /16 4w 2s            64 /16 4w 2s
sm_90   none, 4 B      32 16 rows 4w 1s         32 /16 8w 1s             16 /16 8w 1s
sm_100  e4m3fn, 1 B    128 64 rows 4w 3s fp8    64 /27 4w 3s fp8         64 /27 4w 3s fp8
sm_100  e4m3fnuz, 1 B  128 64 rows 8w 2s        128 /18 4w 2s            64 /18 4w 2s
sm_100  none, 2 B      128 64 rows 8w 2s        128 /18 4w 2s            64 /18 4w 2s
sm_100  none, 4 B      32 16 rows 4w 1s         32 /18 8w 1s             16 /18 8w 1s
sm_120  e4m3fn, 1 B    128 64 rows 4w 3s fp8    64 /35 4w 3s fp8         64 /35 4w 3s fp8
sm_120  e4m3fnuz, 1 B  128 64 rows 8w 2s        128 /23 4w 2s            64 /23 8w 2s
sm_120  none, 2 B      128 64 rows 8w 2s        128 /23 4w 2s            64 /23 8w 2s
sm_120  none, 4 B      32 16 rows 8w 1s         32 /23 8w 1s             16 /23 8w 1s
gfx942  e4m3fn, 1 B    128 64 rows 8w 2s        128 /38 4w 2s            64 /38 4w 2s
gfx942  e4m3fnuz, 1 B  128 64 rows 8w 2s        128 /38 4w 2s            64 /38 4w 2s
gfx942  none, 2 B      128 64 rows 8w 2s        128 /38 4w 2s            64 /38 4w 2s
gfx942  none, 4 B      32 16 rows 8w 1s         32 /38 8w 1s             16 /38 8w 1s
gfx950  e4m3fn, 1 B    128 64 rows 4w 3s fp8    64 /48 4w 3s fp8         64 /48 4w 3s fp8
gfx950  e4m3fnuz, 1 B  128 64 rows 8w 2s        128 /32 4w 2s            64 /32 4w 2s
gfx950  none, 2 B      128 64 rows 8w 2s        128 /32 4w 2s            64 /32 4w 2s
gfx950  none, 4 B      32 16 rows 8w 1s         32 /32 8w 1s             16 /32 8w 1s""",
    )


def scoring(choice):
    plan = choice.plan
    if choice.kernel.name.startswith("hopper"):
        return f"hopper {plan.block_q} rows, {plan.stages} stages"
    per = f"{plan.block_q} rows" if isinstance(plan, PrefillPlan) else f"/{plan.ctas_per_block}"
    return f"{plan.block_kv} {per} {plan.num_warps}w {plan.num_stages}s{' fp8' if plan.fp8_dot else ''}"


def selections(name):
    """Of k = 2048, by rows and columns: the kernel, scores held of a whole row, or candidates / CTAs that share it,
    warps. *: spread over all SMs; =: stored by whole lines."""
    widths, rows = (1024, 4096, 8192, 32768, 131072, 1 << 20), (1, 8, 64, 200, 4096)
    target = TARGETS[name]
    chosen = [
        (count, *(selecting(topk.choose(Problem(count, width, 2048), target)) for width in widths)) for count in rows
    ]
    return table(("rows", *widths), *chosen)


def selecting(choice):
    plan = choice.plan
    shared = f"/{plan.ctas_per_row}" if hasattr(plan, "ctas_per_row") else ""
    marks = "*" * getattr(plan, "spread", False) + "=" * getattr(plan, "coalesced", False)
    return f"{choice.kernel.name} {plan.slots}{shared} {plan.num_warps}w{marks}"


def test_selection_on_hopper():
    assert_expected_inline(
        selections("sm_90"),
        """\
rows  1024                 4096                 8192                      32768                       131072                      1048576
1     single_cta 1024 8w*  single_cta 4096 8w*  single_cta 8192 8w*       hopper.cluster 4096/8 8w    hopper.cluster 16384/8 16w  sampled 8192/64 16w
8     single_cta 1024 8w*  single_cta 4096 8w*  single_cta 8192 8w*       hopper.cluster 4096/8 8w    hopper.cluster 16384/8 16w  sampled 8192/16 16w
64    single_cta 1024 8w*  single_cta 4096 8w*  single_cta 8192 8w*       single_cta_bf16 32768 16w*  appended 8192/2 16w         sampled 8192/2 16w
200   single_cta 1024 2w   single_cta 4096 8w*  single_cta_bf16 8192 8w=  single_cta_bf16 32768 8w    sampled 8192/1 16w          sampled 8192/1 16w
4096  single_cta 1024 2w   single_cta 4096 8w=  single_cta_bf16 8192 4w=  single_cta_bf16 32768 8w    multi_pass 8192/16 8w       multi_pass 8192/16 8w""",
    )


def test_selection_on_ampere():
    assert_expected_inline(
        selections("sm_80"),
        """\
rows  1024                4096                 8192                 32768                  131072                 1048576
1     single_cta 1024 2w  single_cta 4096 8w   single_cta 8192 8w*  single_cta 32768 16w*  multi_cta 8192/16 16w  sampled 8192/64 16w
8     single_cta 1024 2w  single_cta 4096 8w   single_cta 8192 8w*  single_cta 32768 16w*  multi_cta 8192/8 16w   sampled 8192/8 16w
64    single_cta 1024 2w  single_cta 4096 8w   single_cta 8192 8w*  single_cta 32768 16w*  sampled 8192/1 16w     sampled 8192/1 16w
200   single_cta 1024 2w  single_cta 4096 8w   single_cta 8192 8w=  single_cta 32768 16w*  sampled 8192/1 16w     sampled 8192/1 16w
4096  single_cta 1024 2w  single_cta 4096 8w=  single_cta 8192 8w=  single_cta 32768 16w*  multi_pass 8192/16 8w  multi_pass 8192/16 8w""",
    )


def test_selection_on_amd():
    assert_expected_inline(
        selections("gfx942"),
        """\
rows  1024                           4096                           8192                           32768                          131072                         1048576
1     thresholds.single_cta 1024 2w  thresholds.single_cta 4096 4w  thresholds.single_cta 8192 8w  thresholds.sampled 4096/16 8w  thresholds.sampled 8192/64 8w  thresholds.sampled 8192/64 8w
8     thresholds.single_cta 1024 2w  thresholds.single_cta 4096 4w  thresholds.single_cta 8192 8w  thresholds.sampled 4096/16 8w  thresholds.sampled 8192/16 8w  thresholds.sampled 8192/16 8w
64    thresholds.single_cta 1024 2w  thresholds.single_cta 4096 4w  thresholds.single_cta 8192 8w  thresholds.sampled 4096/8 8w   thresholds.sampled 8192/8 8w   thresholds.sampled 8192/8 8w
200   thresholds.single_cta 1024 2w  thresholds.single_cta 4096 4w  thresholds.single_cta 8192 8w  thresholds.sampled 4096/2 8w   thresholds.sampled 8192/2 8w   thresholds.sampled 8192/2 8w
4096  thresholds.single_cta 1024 2w  thresholds.single_cta 4096 4w  thresholds.single_cta 8192 8w  thresholds.sampled 4096/1 8w   thresholds.sampled 8192/1 8w   thresholds.sampled 8192/1 8w""",
    )


def test_products():
    """Tiles, rows x outputs x columns of one, warps, stages; * where values are scaled before they are multiplied."""
    rows = []
    for count, groups in ((1, 1), (6, 256), (48, 256), (768, 256), (24576, 256), (128, 1), (8192, 1)):
        row = [f"{count} / {groups}"]
        for codes, scale, block, dtype in (
            ("e4m3", "fp32", (128, 128), torch.bfloat16), ("e2m1", "e8m0", (1, 32), torch.bfloat16),
            ("e2m1", "e8m0", (1, 32), torch.float16), ("e4m3", "e8m0", (32, 32), torch.float32),
        ):  # fmt: skip
            problem = Product(count, groups, 4096, 7168, dtype, groups > 1, codes, scale, block)
            plan = products.choose(problem, H200).plan
            shape = f"{plan.block_m}x{plan.block_n}x{plan.block_k}"
            scaled = "*" if plan.scaled_values else ""
            row.append(f"{plan.tiles} {shape} {plan.num_warps}w {plan.num_stages}s{scaled}")
        rows.append(row)
    assert_expected_inline(
        table(("rows / groups", "fp8, fp32 scales", "MXFP4", "MXFP4 fp16", "fp8 32x32 fp32"), *rows),
        """\
rows / groups  fp8, fp32 scales      MXFP4                  MXFP4 fp16           fp8 32x32 fp32
1 / 1          1 8x128x128 8w 3s     1 8x64x256 4w 4s*      1 16x32x32 4w 3s     1 16x32x32 4w 2s
6 / 256        6 16x64x128 4w 4s     6 8x64x256 4w 4s*      6 16x32x32 4w 3s     6 16x32x32 4w 2s
48 / 256       48 16x64x128 4w 4s    48 8x64x256 4w 4s*     48 16x32x32 4w 3s    48 16x32x32 4w 2s
768 / 256      288 16x64x128 4w 4s   320 8x64x256 4w 4s*    288 16x32x32 4w 3s   288 16x32x32 4w 2s
24576 / 256    636 64x64x128 4w 3s   636 64x64x128 4w 3s*   636 64x128x32 8w 2s  1016 32x32x32 4w 2s
128 / 1        1 128x128x128 8w 4s   2 64x64x128 4w 3s*     4 32x64x32 4w 2s     4 32x32x32 4w 2s
8192 / 1       64 128x128x128 8w 3s  64 128x128x128 8w 3s*  64 128x64x32 8w 2s   256 32x32x32 4w 2s""",
    )
