"""Kernels in Gluon for Hopper (sm_90)."""
