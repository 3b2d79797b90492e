"""Captured decode against eager decode."""

from __future__ import annotations

import pytest
import torch

from sparse_attn.models.deepseek_v32 import allocate_caches
from sparse_attn.models.params import random_params
from sparse_attn.pipeline import Bounds, cache_layouts, workspace_size
from sparse_attn.runtime.generate import Decode, Model, Sampling, decode_step
from sparse_attn.runtime.graph import DecodeGraph
from sparse_attn.spec import preset
from sparse_attn.target import target_of
