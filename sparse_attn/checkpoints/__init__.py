"""Checkpoint folders: read, written, converted, and what weights take in memory."""
