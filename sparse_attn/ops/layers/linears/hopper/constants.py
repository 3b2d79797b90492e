"""Sizes of the Hopper kernel that its configuration needs, too."""

BLOCK_K = 128  # columns of a step
OUTPUTS = 64  # of a consumer, a warpgroup
