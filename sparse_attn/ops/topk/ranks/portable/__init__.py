"""Kernels in Triton that every GPU runs."""
