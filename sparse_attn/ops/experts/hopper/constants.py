"""Sizes that the kernel's configuration needs, too."""

BLOCK_K = 128  # columns of a step, four groups of MXFP4
BOX = 64  # outputs of a box of codes; a tile has two boxes
ALIGN = 4  # rows: TMA copies from multiples of 16 bytes on, and scales of rows are fp32
CONSUMERS = 2  # warpgroups, each with half of either box
