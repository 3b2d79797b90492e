"""Sizes of the Hopper kernels that their configuration needs, too."""

BLOCK_K = 128  # columns of a step, or of a product of the experts: four groups of MXFP4
CONSUMERS = 2  # warpgroups of a CTA; of a linear's four partials would be more and larger

# Linears.
OUTPUTS = 64  # of a consumer

# Experts, whose consumers share both boxes of codes of a tile.
STEP = 2 * BLOCK_K  # columns of a stage
BOX = 32  # a consumer's outputs of a box
CTAS = {32: 2, 64: 1, 128: 1}  # that share an SM, by rows of a tile
LAUNCH_REGISTERS = {1: 168, 2: 80}  # of a thread, by CTAs of an SM
REGISTERS = {1: (224, 56), 2: (104, 32)}  # once warps specialise: a consumer's, the producer's
ROWS = 32  # of a box of rows; a tile has one, two or four
