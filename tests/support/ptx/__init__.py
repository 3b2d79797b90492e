"""PTX of warp-specialised kernels, executed on a CPU: what they compute, without a GPU of theirs.

``run.execute`` launches one kernel of a launcher with CPU tensors, a CTA after the other. Warps take turns in an order
that a seed decides. Copies and products happen where they are issued, and barriers are those of the hardware, so a wait
that nobody answers is found, but no race. Products are summed exactly, not as the matrix unit rounds them.
"""
