"""The command line, `python -m sparse_attn`."""
