"""Sparse attention, the caches of keys and values it reads, and the compressor that writes entries."""
