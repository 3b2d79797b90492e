"""Sizes that the kernel's configuration needs, too."""

BLOCK_K = 128  # columns of a product, four groups of MXFP4
STEP = 2 * BLOCK_K  # columns of a stage
CONSUMERS = 2  # warpgroups, each with two boxes of codes of a tile
BOX = 32  # outputs of a box of codes
LAUNCH_REGISTERS = 168  # of a thread
REGISTERS = 224, 56  # of a thread once warps specialise: a consumer's, the producer's
ROWS = 32  # of a box of rows; a tile has one, two or four
