"""Experts of many tokens: rows sorted by expert, tiles of one expert each, and no copy between the products."""
