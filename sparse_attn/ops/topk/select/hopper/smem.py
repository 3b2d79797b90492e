"""Words of a CTA's shared memory behind those of the histogram. Of the histogram's, HIGHEST has the CTA's least key."""

import triton
from triton.experimental.gluon import language as gl

from sparse_attn.device.histogram import BINS, WORDS

MOST_CTAS = gl.constexpr(16)  # of a cluster
MOST_TIES = gl.constexpr(64)  # that are ranked

# mbarriers, two words each: what has come
ANCHORED = gl.constexpr(WORDS.value)
SCATTERED = gl.constexpr(WORDS.value + 2)
GATHERED = gl.constexpr(WORDS.value + 4)
TIED = gl.constexpr(WORDS.value + 6)
HEARD = gl.constexpr(WORDS.value + 8)
# what comes
ANCHORS = gl.constexpr(WORDS.value + 12)  # of each CTA: the key that its bins begin with
COUNTS = gl.constexpr(ANCHORS.value + MOST_CTAS.value)  # of each CTA: keys above the k-th's bin, keys in it
NEWS = gl.constexpr(COUNTS.value + 2 * MOST_CTAS.value)  # of each CTA: anything, once it knows where the row begins
TIES = gl.constexpr(NEWS.value + MOST_CTAS.value)  # [CTAS, MOST_TIES, 2]: key and column
PARTS = gl.constexpr(
    TIES.value + 2 * MOST_CTAS.value * MOST_TIES.value
)  # [CTAS, BINS / CTAS]: of each, this CTA's part
SUMS = gl.constexpr(PARTS.value + BINS.value)  # [BINS]: of all CTAs
# of this CTA
OWN_COUNTS = gl.constexpr(SUMS.value + BINS.value)  # what it tells as COUNTS, in the halves of a word
EARLIER = gl.constexpr(OWN_COUNTS.value + 1)  # ties of the CTAs before it that win
LISTED = gl.constexpr(OWN_COUNTS.value + 2)  # ties listed as KEYS and COLUMNS
OWN_LISTED = gl.constexpr(OWN_COUNTS.value + 3)  # ties listed as OWN_TIES
OWN_TIES = gl.constexpr(OWN_COUNTS.value + 4)  # [MOST_TIES, 2]: what it tells as TIES
KEYS = gl.constexpr(OWN_TIES.value + 2 * MOST_TIES.value)  # of all CTAs' ties, in any order
COLUMNS = gl.constexpr(KEYS.value + MOST_TIES.value)
MARKS = gl.constexpr(COLUMNS.value + MOST_TIES.value)  # a byte for four columns: above in bits 0 to 3, tied in 4 to 7


@triton.constexpr_function
def words(slots):
    """Of all this, of a CTA of ``slots`` columns."""
    return MARKS.value - WORDS.value + slots // 16
