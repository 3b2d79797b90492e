"""A CTA's shared memory, and the histogram of radix digits at its start. Triton cannot name shared memory. So this is
PTX on NVIDIA, and global memory in the interpreter.

Words, in order: BINS bins; one bin for what is not to be counted; the length of the smem list; a zero; a highest value;
a note of four words, through which one thread tells all others a result. ``smem`` is the address, or a pointer in the
interpreter. Triton may replicate a tensor of fewer elements than threads. That matters where every copy would be
counted.
"""

import triton
import triton.language as tl

DIGIT_BITS = tl.constexpr(11)
BINS = tl.constexpr(2048)
LENGTH = tl.constexpr(2048 + 1)  # word of the smem list's length
ZERO = tl.constexpr(2048 + 2)  # word that is 0
HIGHEST = tl.constexpr(2048 + 3)
NOTE = tl.constexpr(2048 + 4)  # first word of the note
WORDS = tl.constexpr(2048 + 8)  # of all this; what comes behind is smem_list.py's

LOAD = tl.constexpr("ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];")
STORE = tl.constexpr(
    "{ .reg .pred p; setp.ne.s32 p, $6, 0; @p st.shared.v4.b32 [$1], {$2, $3, $4, $5}; mov.u32 $0, 0; }"
)
# Without a predicate, which ptxas turns into a branch for every key. Threads of a warp that meet in a bin cost nothing
# (ATOMS.POPC.INC), so all that is not to be counted goes to one bin.
COUNT = tl.constexpr(
    """{ .reg .b32 bin;
    sub.u32 bin, $1, $2;  shr.u32 bin, bin, $3;  min.u32 bin, bin, 2048;  mad.lo.u32 bin, bin, 4, $4;
    red.shared.add.u32 [bin], 1;  mov.u32 $0, 0; }"""
)
LOAD_ONE = tl.constexpr("ld.shared.b32 $0, [$1];")
STORE_ONE = tl.constexpr("st.shared.b32 [$1], $2; mov.u32 $0, 0;")
NOTE_HIGHEST = tl.constexpr(
    """{ .reg .pred p; .reg .b32 best, lane;
    redux.sync.max.s32 best, $1, 0xffffffff;  mov.u32 lane, %laneid;  setp.eq.u32 p, lane, 0;
    @p red.shared.max.s32 [$2], best;  mov.u32 $0, 0; }"""
)
COUNT_LEADING = tl.constexpr(
    "{ .reg .b32 bin; shr.u32 bin, $1, 21; mad.lo.u32 bin, bin, 4, $2; red.shared.add.u32 [bin], 1; mov.u32 $0, 0; }"
)


@triton.constexpr_function
def _claiming(words):
    return f"{{ .shared .align 16 .b8 smem[{4 * (WORDS.value + words)}]; mov.u32 $0, smem; }}"


@triton.jit
def claim(emulated_smem, BEHIND: tl.constexpr):
    """The CTA's shared memory: a histogram and BEHIND more words. A kernel claims it once. A kernel that also uses
    wgmma must claim a multiple of 1,024 bytes, or its products are silently wrong: dynamic shared memory starts behind
    the claimed bytes, and wgmma reads swizzled operands as if it started at such a multiple. emulated_smem: int32
    [CTAs, WORDS + BEHIND] in the interpreter, else None."""
    if emulated_smem is None:
        return tl.inline_asm_elementwise(_claiming(BEHIND), "=r", [], dtype=tl.int32, is_pure=False, pack=1)
    else:
        return emulated_smem + tl.program_id(0) * (WORDS + BEHIND)


@triton.jit
def claim_cleared(emulated_smem, BEHIND: tl.constexpr, THREADS: tl.constexpr):
    """claim, with the histogram zeroed. Where the search goes by thresholds (THREADS is 0), nothing is claimed."""
    if THREADS > 0:
        smem = claim(emulated_smem, BEHIND)
        clear(smem, THREADS)
        return smem
    else:
        return tl.full([], 0, tl.int32)


@triton.jit
def clear(smem, THREADS: tl.constexpr):
    """Zero the histogram. THREADS: of the CTA; each clears four bins at least."""
    tl.static_assert(4 * THREADS <= BINS)
    thread = tl.arange(0, THREADS)
    zero = tl.zeros([THREADS], tl.int32)
    for quad in tl.static_range(BINS // (4 * THREADS)):
        store_four(smem, (quad * THREADS + thread) * 4, zero, zero, zero, zero, zero + 1)
    # The words behind the bins: what is not counted, the list's length, the zero and the highest value.
    store_four(smem, BINS + 4 * thread, zero, zero, zero, zero, (thread == 0).to(tl.int32))
    tl.debug_barrier()


@triton.jit
def after(smem, word):
    """The shared memory that starts ``word`` words further on."""
    if smem.dtype.is_ptr():
        return smem + word
    else:
        return smem + word * 4


@triton.jit
def load_four(smem, word):
    """Four words from word ``word`` on, a multiple of 4."""
    if smem.dtype.is_ptr():
        at = smem + word
        return tl.load(at), tl.load(at + 1), tl.load(at + 2), tl.load(at + 3)
    else:
        return tl.inline_asm_elementwise(
            LOAD,
            "=r,=r,=r,=r,r",
            [smem + word * 4],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )


@triton.jit
def store_four(smem, word, a, b, c, d, mask):
    """Store four words from word ``word`` on, a multiple of 4, where ``mask`` (int32) is not 0."""
    if smem.dtype.is_ptr():
        at = smem + word
        tl.store(at, a, mask=mask != 0)
        tl.store(at + 1, b, mask=mask != 0)
        tl.store(at + 2, c, mask=mask != 0)
        tl.store(at + 3, d, mask=mask != 0)
    else:
        operands = [smem + word * 4, a, b, c, d, mask]
        tl.inline_asm_elementwise(STORE, "=r,r,r,r,r,r,r", operands, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def load_one(smem, word):
    if smem.dtype.is_ptr():
        return tl.load(smem + word)
    else:
        return tl.inline_asm_elementwise(LOAD_ONE, "=r,r", [smem + word * 4], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def store_one(smem, word, value):
    if smem.dtype.is_ptr():
        tl.store(smem + word, value)
    else:
        operands = [smem + word * 4, value]
        tl.inline_asm_elementwise(STORE_ONE, "=r,r,r", operands, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def count(smem, keys, base, shift):
    """For every key add one to bin (key - base) >> shift, unsigned, if there is such a bin. There are at least as many
    keys as the CTA has threads."""
    if smem.dtype.is_ptr():
        bin = (keys - base).to(tl.uint32, bitcast=True) >> shift.to(tl.uint32)
        tl.atomic_add(smem + tl.minimum(bin, BINS).to(tl.int32), 1)
    else:
        operands = [keys, base, shift, smem]
        tl.inline_asm_elementwise(COUNT, "=r,r,r,r,r", operands, dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def count_leading(smem, keys):
    """For every key add one to the bin of its 11 leading bits. There are at least as many keys as threads."""
    if smem.dtype.is_ptr():
        tl.atomic_add(smem + (keys.to(tl.uint32, bitcast=True) >> 21).to(tl.int32), 1)
    else:
        tl.inline_asm_elementwise(COUNT_LEADING, "=r,r,r", [keys, smem], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def highest(smem, values):
    """The highest of ``values`` [n] (int32, none below 0), behind one barrier. Word HIGHEST was 0 behind another."""
    if smem.dtype.is_ptr():
        return tl.max(values, 0)
    else:
        operands = [values, smem + HIGHEST * 4]
        tl.inline_asm_elementwise(NOTE_HIGHEST, "=r,r,r", operands, dtype=tl.int32, is_pure=False, pack=1)
        tl.debug_barrier()
        return load_one(smem, HIGHEST)
