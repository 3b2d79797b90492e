"""Fake implementations."""

from sparse_attn.ops.layers.hyper_connection.shapes import allocate_mix, allocate_streams


def hyper_mix(streams, raw, base, scale, iterations, eps, norm_eps):
    return allocate_mix(streams)


def hyper_merge(out, streams, post, comb):
    return allocate_streams(streams)
