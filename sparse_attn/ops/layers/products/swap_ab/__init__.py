"""Few rows on every GPU: the packed weight takes the matrix unit's M dimension, the rows its N (swap-AB)."""
