"""The forward's weights as values: dtypes, rope tables, and seeded random ones.

The forward takes one flat dict: the weights of models.shapes, and beside them "rope" (and "rope_compressed"), the fp32
cos and sin tables.

Values are torch.nn.Parameter without gradient: torch.compile takes a parameter's shape as fixed, whereas the sizes of a
plain tensor become symbols under dynamic=True and can be taken for a batch size that happens to be equal.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch

from sparse_attn.models.shapes import param_shapes, prediction_shapes
from sparse_attn.ops.layers.rope import Yarn, rope_table
from sparse_attn.spec import CompressedSpec, Spec
from sparse_attn.weight_layout import PackedWeight, Weight

# Kept in fp32 whatever the model's dtype: a rounding there changes which keys or experts are selected, or is multiplied
# through every layer.
FP32_NAMES = ("index.weights", "moe.gate", "moe.bias", ".sink", ".position_bias", ".fn", ".base", ".scale")
# Of those, held in bf16 in a model of bf16 where files have them in bf16: norms.linear_fp32 rounds neither factor.
NARROW = ("moe.gate", "index.weights")
INTEGER_NAMES = ("moe.table",)
ROPE_NAMES = ("rope", "rope_compressed")
# Expanded to the model's dtype where files have them quantised; every other matrix stays packed. All of them together
# are less than 1% of a published checkpoint.
EXPANDED = {
    "embed": "rows are looked up, nothing is multiplied",
    "attn.w_uk": "kv_b is absorbed: a head's part is cut inside of scale blocks, and multiplies on either side",
    "attn.w_uv": "as attn.w_uk",
} | dict.fromkeys(("kv_gate",), "the compressor pools products in fp32")


def param_dtype(name: str, dtype: torch.dtype, stored: torch.dtype | None = None) -> torch.dtype:
    """The dtype a weight is held in, in a model of ``dtype``. stored: the one that files have it in, if they do."""
    if name.endswith(INTEGER_NAMES):
        return torch.int32
    if name.endswith(NARROW) and dtype == stored == torch.bfloat16:
        return torch.bfloat16
    return torch.float32 if name.endswith(FP32_NAMES) else dtype


def stays_packed(name: str) -> bool:
    """Whether a weight that files have quantised is held as it is; others are expanded."""
    return not name.endswith((*EXPANDED, *FP32_NAMES, *INTEGER_NAMES))


def keeps_dtype(name: str) -> bool:
    """Whether a weight's dtype is the same in models of every dtype."""
    return name.endswith(FP32_NAMES + INTEGER_NAMES) or name in ROPE_NAMES


def hold(value: torch.Tensor) -> torch.nn.Parameter:
    """``value`` as a weight of fixed shape; a parameter is one already."""
    return value if isinstance(value, torch.nn.Parameter) else torch.nn.Parameter(value, requires_grad=False)


def hold_weight(weight: Weight) -> Weight:
    """``weight`` with its tensors as hold() gives them."""
    if not isinstance(weight, PackedWeight):
        return hold(weight)
    return PackedWeight(hold(weight.codes), hold(weight.scales), weight.layout)


def model_rope_tables(
    spec: Spec | CompressedSpec, device: torch.device | str, positions: int | None = None
) -> dict[str, torch.nn.Parameter]:
    """cos and sin of ``spec`` for positions [0, positions), fp32, by name; None: all the model knows."""
    count = spec.max_positions if positions is None else positions
    yarn = spec.yarn and Yarn(**asdict(spec.yarn))
    if isinstance(spec, CompressedSpec):
        tables = {"rope": (spec.rope_theta, None), "rope_compressed": (spec.compressed_rope_theta, yarn)}
    else:
        tables = {"rope": (spec.rope_theta, yarn)}
    return {
        name: hold(rope_table(count, spec.rope_dim, theta, yarn=ramp, device=device))
        for name, (theta, ramp) in tables.items()
    }


def random_params(
    spec: Spec | CompressedSpec, seed: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32,
    *, mtp: bool = False,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Seeded weights, the same on every device: uniform values of unit gain, drawn in fp32 on the CPU.

    Args:
        spec: of the model.
        seed: of the weights.
        device: where they lie.
        dtype: of the model.
        mtp: with a layer of multi-token prediction, which changes no other weight.

    Returns:
        Weights by name, as the forwards take them.
    """
    drawing: dict[str, Any] = dict(
        generator=torch.Generator("cpu").manual_seed(seed), dtype=torch.float32, device="cpu"
    )
    params: dict[str, torch.Tensor] = {}
    for name, shape in (param_shapes(spec) | prediction_shapes(spec, int(mtp))).items():
        if name.endswith(INTEGER_NAMES):
            drawn = torch.rand(shape[0], spec.moe.num_experts, **drawing)
            value = drawn.argsort(dim=1, stable=True)[:, : shape[1]]
        else:
            # torch.rand scales integers, which rounds alike everywhere; a normal distribution goes through libm.
            value = random_weight(name, 2 * torch.rand(shape, **drawing) - 1)
        params[name] = hold(value.to(device=device, dtype=param_dtype(name, dtype)))
    return params | model_rope_tables(spec, device)


def random_weight(name: str, noise: torch.Tensor) -> torch.Tensor:
    """A weight out of uniform ``noise`` in [-1, 1)."""
    if name.endswith(("norm", ".scale")):
        return 1 + 0.1 * noise
    if name.endswith(("bias", ".base")):
        return 0.1 * noise
    if name.endswith(("embed", ".sink")):
        return noise
    # w_uv is stored [heads, in, out], every other weight [..., out, in].
    fan_in = noise.shape[-2] if name.endswith(("w_uv", "w_uk")) else noise.shape[-1]
    return noise * (3 / fan_in) ** 0.5
