"""Few rows on every GPU: each expert's weights are read once, and take the matrix unit's M dimension (swap-AB)."""
