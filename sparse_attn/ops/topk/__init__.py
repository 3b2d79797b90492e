"""The k highest scores of a row: of scores that are there, fused with scoring, and over ranks."""
