"""Sizes that Hopper's index scores are built for, of host and device: dispatch.py and the kernels read them here.

Kernels read them as constexprs (common.py), since Triton records no other global of a kernel in its cache's key.
"""

DIM = 128  # values of a key
HEADS = (32, 64, 128)  # of a row
BLOCK_KV = 64  # keys of a tile, which are the rows of a product; in the paged form a block of the cache
COLUMNS = 128  # MMA columns of a product at most: heads of some rows
CONSUMERS = 4  # warpgroups that multiply
PRODUCTS = 2  # of a tile at most, each by other consumers
BLOCK_Q = 4  # rows of a paged query block at most
Q_STAGES = 2  # query blocks in shared memory
# Of e5m2 operands that MXFP4 values are decoded to.
WINDOW = 26  # powers of two that fit beside the three of a code: 0.5 * 2^-13 to 6 * 2^13
TOP = 13  # the power of two of a record's highest group
