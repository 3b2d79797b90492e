"""The GPU implementation: one launch each."""

from __future__ import annotations

import torch
import triton

from sparse_attn.device import pdl
from sparse_attn.framework.target import target_of
from sparse_attn.ops.ragged.step_plans import fake, kernels

BLOCKS = {"BLOCK_T": 64, "BLOCK_R": 64, "num_warps": 4}  # token rows and requests of a program


def step_plan(
    query_start_loc: torch.Tensor, seq_lens: torch.Tensor, slot_mapping: torch.Tensor, num_decodes: int, next_n: int
) -> tuple[torch.Tensor, ...]:
    plan = fake.allocate_plan(seq_lens, slot_mapping, num_decodes, next_n)
    target = target_of(slot_mapping.device)
    tokens = slot_mapping.shape[0]
    kernels.plan_rows[(max(1, triton.cdiv(tokens, BLOCKS["BLOCK_T"])),)](
        query_start_loc,
        seq_lens,
        slot_mapping,
        *plan,
        tokens,
        seq_lens.shape[0],
        num_decodes,
        next_n,
        query_start_loc.stride(0),
        seq_lens.stride(0),
        slot_mapping.stride(0),
        **BLOCKS,
        **pdl.launched(target),
    )
    return plan


def compressed_plan(
    request_ids: torch.Tensor,
    positions: torch.Tensor,
    block_table: torch.Tensor,
    kv_indptr: torch.Tensor,
    decode_rows: int,
    ratio: int,
    block_size: int,
) -> tuple[torch.Tensor, ...]:
    plan = fake.allocate_compressed(positions, kv_indptr, decode_rows)
    target = target_of(positions.device)
    tokens, prefills = positions.shape[0], kv_indptr.shape[0] - 1
    kernels.compressed_rows[(max(1, triton.cdiv(tokens, BLOCKS["BLOCK_T"])),)](
        request_ids,
        positions,
        block_table,
        kv_indptr,
        *plan,
        tokens,
        decode_rows,
        block_table.shape[0],
        prefills,
        block_table.shape[1],
        request_ids.stride(0),
        positions.stride(0),
        block_table.stride(0),
        kv_indptr.stride(0),
        RATIO=ratio,
        BLOCK_SIZE=block_size,
        **BLOCKS,
        **pdl.launched(target),
    )
    return plan
