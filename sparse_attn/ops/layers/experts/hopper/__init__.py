"""Experts of fp8 rows and MXFP4 weights on Hopper."""
