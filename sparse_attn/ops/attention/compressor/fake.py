"""Fake implementations."""


def compress_and_cache():
    return None
