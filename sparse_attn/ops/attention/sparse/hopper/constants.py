"""Sizes that Hopper's attention kernels are built for, of host and device: config.py and the kernels read them here.

Kernels read them as constexprs (common.py), since Triton records no other global of a kernel in its cache's key.
"""

D_V = 512  # columns of a value
D_ROPE = 64  # columns that QK alone reads, behind the value; of planar records the value's last
BLOCK_M = 64  # heads of a CTA, but for swap-AB
BLOCK_N = 64  # keys of a tile; the seesaw takes pairs of tiles
SWAP_AB_HEADS = 32  # the most that the swap-AB kernel takes
LOAD_BYTES = 16  # of a load, in which strides of caches are counted
WORD_BYTES = 4  # of a register, which holds as many fp8 codes
