"""Sizes that the kernel's configuration needs, too."""

BLOCK_K = 128  # columns of a product, four groups of MXFP4
STEP = 2 * BLOCK_K  # columns of a stage
BOX = 64  # outputs of a box of codes; a tile has two boxes
ROWS = 32  # of a box of rows; a tile has one, two or four
CONSUMERS = 2  # warpgroups, each with half of either box
OWN = BOX // CONSUMERS  # outputs of a box that a consumer has
