"""Bugs of top-k by a cluster on Hopper, whose PTX is executed on a CPU."""

from mutations.mutation import OPS, Mutation

FOLDER = OPS + "topk/select/hopper/"
TEST = "tests/ops/test_ptx_topk.py::test_whatever_the_scores"
SLOTS = ("tests/ops/test_ptx_topk.py::test_cache_slots",)

# fmt: off
CLUSTERED = [
    Mutation(
        "clustered-bins-in-place", "bins of a CTA whose window begins later are added as if it did not",
        FOLDER + "search.py", "gl.where(there, bin - skipped, 0)", "gl.where(there, bin, 0)",
        (f"{TEST}[normal]",),
    ),
    Mutation(
        "clustered-all-but-the-last", "the last CTA's counts are not added",
        FOLDER + "search.py", "for source in gl.static_range(CTAS):", "for source in gl.static_range(CTAS - 1):",
        (f"{TEST}[normal]",),
    ),
    Mutation(
        "clustered-keys-before-the-second-window", "keys of the first window are not counted in the second",
        FOLDER + "search.py", "gl.where(second, more, 0)", "gl.where(second, 0, 0)",
        (f"{TEST}[the k-th in the second window]",),
    ),
    Mutation(
        "clustered-window-of-what-cannot-be-selected", "a window may hold keys of what is not to be selected",
        FOLDER + "search.py", "own = gl.where(before(own, reach), own, reach)", "own = own",
        (f"{TEST}[none]", f"{TEST}[fewer than k that can be selected]"),
    ),
    Mutation(
        "clustered-few-unseen", "where there are fewer than k, others are selected",
        FOLDER + "search.py", "(digit == UNSELECTABLE)", "(digit > UNSELECTABLE)",
        (f"{TEST}[fewer than k that can be selected]",),
    ),
    Mutation(
        "clustered-sums-of-the-pass-before", "a further pass does not wait for its sums",
        FOLDER + "search.py", "cluster.await_bytes(smem, GATHERED, phase)", "cluster.await_bytes(smem, GATHERED, 0 * phase)",
        (f"{TEST}[a plateau that the k-th lies on]", f"{TEST}[forty values]"),
    ),
    Mutation(
        "clustered-any-tie", "of equal keys that are ranked too many are selected",
        FOLDER + "ties.py", " | ((keys[one] == key) & (columns[one] < column))", "",
        (f"{TEST}[some equal]",),
    ),
    Mutation(
        "clustered-ties-of-the-first-cta", "winning ties of the CTAs before take no places",
        FOLDER + "kernels.py", "position += ties.rank_ties(", "position += 0 * ties.rank_ties(",
        (f"{TEST}[some equal]",),
    ),
    Mutation(
        "clustered-first-ties-of-each-cta", "of equal keys each CTA selects its first ones",
        FOLDER + "kernels.py", "ties.first_bits(equal, need - earlier)", "ties.first_bits(equal, need - earlier + tied)",
        (f"{TEST}[a plateau that the k-th lies on]",),
    ),
    Mutation(
        "clustered-ended-too-early", "CTA 0 does not wait until the others know where the row begins",
        FOLDER + "kernels.py", "            cluster.await_bytes(smem, HEARD, rank * 0)\n", "",
        SLOTS,
    ),
    Mutation(
        "clustered-unused-of-all", "behind all rows a row clears what is another's",
        FOLDER + "kernels.py", " + begin - (most - count)", " + begin - most",
        SLOTS,
    ),
]
