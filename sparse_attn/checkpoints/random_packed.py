"""Random weights of a published form, packed, drawn where they are used: no files, no copy on the host."""

from __future__ import annotations

import torch

from sparse_attn.checkpoints.formats import form_of, layout_of, parts_of, stored_dtype
from sparse_attn.checkpoints.published import random_packed_weight
from sparse_attn.checkpoints.read import Reading
from sparse_attn.mesh import ONE_RANK, Mesh
from sparse_attn.models.params import (
    INTEGER_NAMES,
    hold_weight,
    model_rope_tables,
    param_dtype,
    random_weight,
    stays_packed,
)
from sparse_attn.spec import CompressedSpec, Spec
from sparse_attn.weight_layout import Weight


def random_packed_params(
    spec: Spec | CompressedSpec, seed: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.bfloat16,
    *, form: str = "published", mesh: Mesh = ONE_RANK, mtp: bool = False,
) -> dict[str, Weight]:  # fmt: skip
    """Seeded weights of ``spec`` on ``device``, in the layouts that loading(expand=False) gives those of ``form``.

    Codes are random bytes, none NaN; scales give a weight unit gain. Values depend on the kind of device.

    Args:
        spec: of the model.
        seed: of the weights.
        device: where they lie.
        dtype: of weights that are not packed.
        form: see checkpoints.convert.convert.
        mesh: whose part of the weights is drawn. All ranks draw alike, so what lies on each of them is the same; what
            is sharded is not one process's.
        mtp: with a layer of multi-token prediction.

    Returns:
        Weights by name, as Model takes them.

    Raises:
        ValueError: a form that the architecture does not have.
    """
    made = form_of(spec, form)
    generator = torch.Generator(device).manual_seed(seed)
    params: dict[str, Weight] = {}
    for name, kind, shape, sources, each in parts_of(spec, made, int(mtp)):
        layout = layout_of(kind, made) if stays_packed(kind) else None
        reading = Reading(name, shape, sources, each, layout, mesh)
        held, shape = reading.held, reading.kept.shape
        if held is not None:
            params[name] = hold_weight(random_packed_weight(shape, held, generator))
            continue
        if kind.endswith(INTEGER_NAMES):
            value = torch.randint(
                spec.moe.num_experts, shape, dtype=torch.int32, device=generator.device, generator=generator
            )
        else:
            value = torch.empty(shape, dtype=param_dtype(kind, dtype, stored_dtype(kind)), device=generator.device)
            value.uniform_(-1, 1, generator=generator)
            value = random_weight(kind, value).to(value.dtype)
        params[name] = hold_weight(value)
    return params | model_rope_tables(spec, device)
