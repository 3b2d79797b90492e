"""Sizes that the kernel's configuration needs, too."""

BLOCK_K = 128  # columns of a step, four groups of MXFP4
BOX = 64  # outputs of a box of codes; a tile has two boxes
CONSUMERS = 2  # warpgroups, each with half of either box
