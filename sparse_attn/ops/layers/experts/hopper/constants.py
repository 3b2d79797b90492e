"""Sizes that the kernel's configuration needs, too."""

BLOCK_K = 128  # columns of a product, four groups of MXFP4
STEP = 2 * BLOCK_K  # columns of a stage
CONSUMERS = 2  # warpgroups, which share both boxes of codes of a tile
BOX = 32  # a consumer's outputs of a box
CTAS = {32: 2, 64: 1, 128: 1}  # that share an SM, by rows of a tile
LAUNCH_REGISTERS = {1: 168, 2: 80}  # of a thread, by CTAs of an SM
REGISTERS = {1: (224, 56), 2: (104, 32)}  # once warps specialise: a consumer's, the producer's
ROWS = 32  # of a box of rows; a tile has one, two or four
