"""Rows quantised to fp8, a scale for every 128 columns, times fp8 weights (W8A8)."""
