"""Which tensors the forward needs, under which names, in which shapes; and seeded random ones.

Names of layer i start with "layers.{i}."; the forward takes them as one flat dict. Beside the weights the dict holds
"rope", the fp32 cos and sin table.

Values are torch.nn.Parameter without gradient: torch.compile takes a parameter's shape as fixed, whereas the sizes of a
plain tensor become symbols under dynamic=True and can be taken for a batch size that happens to be equal.
"""

from __future__ import annotations

from dataclasses import asdict

import torch

from sparse_attn.ops.rope import Yarn, rope_table
from sparse_attn.spec import Spec

# Kept in fp32 whatever the model's dtype: a rounding there changes which keys or experts are selected.
FP32_NAMES = ("index.weights", "moe.gate", "moe.bias")


def param_shapes(spec: Spec) -> dict[str, tuple[int, ...]]:
    """Shape of every weight of the forward, by name, in a fixed order."""
    hidden, heads = spec.hidden_size, spec.num_heads
    shapes: dict[str, tuple[int, ...]] = {"embed": (spec.vocab_size, hidden), "norm": (hidden,)}
    if not spec.tie_embeddings:
        shapes["lm_head"] = (spec.vocab_size, hidden)
    for layer in range(spec.num_layers):
        own = {
            "input_norm": (hidden,),
            "post_norm": (hidden,),
            "attn.q_a": (spec.q_lora, hidden),
            "attn.q_a_norm": (spec.q_lora,),
            "attn.q_b": (heads * spec.qk_dim, spec.q_lora),
            "attn.kv_a": (spec.latent_dim, hidden),
            "attn.kv_a_norm": (spec.kv_lora,),
            "attn.w_uk": (heads, spec.nope_dim, spec.kv_lora),
            "attn.w_uv": (heads, spec.kv_lora, spec.v_dim),
            "attn.o": (hidden, heads * spec.v_dim),
        }
        if spec.index_layers[layer]:
            own |= _index_shapes(spec)
        own |= _moe_shapes(spec) if spec.moe_layers[layer] else _dense_shapes(spec)
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in own.items()}
    return shapes


def _index_shapes(spec: Spec) -> dict[str, tuple[int, ...]]:
    index = spec.index
    return {
        "index.q_b": (index.num_heads * index.head_dim, spec.q_lora),
        "index.k": (index.head_dim, spec.hidden_size),
        "index.k_norm": (index.head_dim,),
        "index.k_norm_bias": (index.head_dim,),
        "index.weights": (index.num_heads, spec.hidden_size),
    }


def _dense_shapes(spec: Spec) -> dict[str, tuple[int, ...]]:
    return {
        "mlp.gate_up": (2 * spec.dense_intermediate_size, spec.hidden_size),
        "mlp.down": (spec.hidden_size, spec.dense_intermediate_size),
    }


def _moe_shapes(spec: Spec) -> dict[str, tuple[int, ...]]:
    moe, hidden = spec.moe, spec.hidden_size
    shapes = {
        "moe.gate": (moe.num_experts, hidden),
        "moe.bias": (moe.num_experts,),
        "moe.gate_up": (moe.num_experts, 2 * moe.intermediate_size, hidden),
        "moe.down": (moe.num_experts, hidden, moe.intermediate_size),
    }
    if moe.num_shared:
        shapes["moe.shared_gate_up"] = (2 * moe.num_shared * moe.intermediate_size, hidden)
        shapes["moe.shared_down"] = (hidden, moe.num_shared * moe.intermediate_size)
    return shapes


def param_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype a weight is held in, in a model of ``dtype``."""
    return torch.float32 if name.endswith(FP32_NAMES) else dtype


def hold(value: torch.Tensor) -> torch.nn.Parameter:
    """``value`` as a weight of fixed shape."""
    return torch.nn.Parameter(value, requires_grad=False)


def model_rope_table(spec: Spec, device: torch.device | str, positions: int | None = None) -> torch.Tensor:
    """cos and sin of ``spec`` for positions [0, positions), fp32; None: all the model knows."""
    count = spec.max_positions if positions is None else positions
    yarn = spec.yarn and Yarn(**asdict(spec.yarn))
    return rope_table(count, spec.rope_dim, spec.rope_theta, yarn=yarn, device=device)


def random_params(
    spec: Spec, seed: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> dict[str, torch.Tensor]:
    """Seeded weights, the same on every device: uniform values of unit gain, drawn in fp32 on the CPU."""
    generator = torch.Generator("cpu").manual_seed(seed)
    params = {}
    for name, shape in param_shapes(spec).items():
        # torch.rand scales integers, which rounds alike everywhere; a normal distribution goes through libm.
        noise = 2 * torch.rand(shape, generator=generator, device="cpu") - 1
        if name.endswith("norm"):
            value = 1 + 0.1 * noise
        elif name.endswith("bias"):
            value = 0.1 * noise
        elif name == "embed":
            value = noise
        else:
            # w_uv is stored [heads, in, out], every other weight [..., out, in].
            fan_in = shape[-2] if name.endswith(("w_uv", "w_uk")) else shape[-1]
            value = noise * (3 / fan_in) ** 0.5
        params[name] = hold(value.to(device=device, dtype=param_dtype(name, dtype)))
    params["rope"] = hold(model_rope_table(spec, device))
    return params
