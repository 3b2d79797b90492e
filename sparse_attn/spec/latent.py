"""Models of multi-head latent attention with a lightning indexer: DeepSeek-V3.2 and GLM-5.

Sources: the config.json files that
DeepSeek and Zhipu publish, and transformers 5.17's DeepseekV32Config and GlmMoeDsaConfig, whose modelling code pins
what the files leave open (the latent norms' eps, half-split index rope in V3.2 and interleaved in GLM-5).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sparse_attn.spec.parts import IndexSpec, MoeSpec, YarnSpec, softmax_scale

# The latent norms keep 1e-6 in both models, whatever rms_norm_eps says.
LATENT_NORM_EPS = 1e-6


@dataclass(frozen=True)
class Spec:
    """Everything the forward needs. Per layer: ``moe_layers[i]`` says routed or dense, ``index_layers[i]`` whether the
    layer runs its own indexer (True) or shares the selection of the last layer that did.

    softmax_scale belongs to the un-absorbed head (nope + rope) and includes yarn's m squared.
    """

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    q_lora: int
    kv_lora: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    index: IndexSpec
    moe: MoeSpec
    dense_intermediate_size: int
    moe_layers: tuple[bool, ...]
    index_layers: tuple[bool, ...]
    max_positions: int
    rope_theta: float
    softmax_scale: float
    yarn: YarnSpec | None = None
    rope_interleaved: bool = True
    rms_eps: float = 1e-6
    latent_norm_eps: float = LATENT_NORM_EPS
    tie_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = field(default=())

    def __post_init__(self):
        for name in ("moe_layers", "index_layers"):
            entries = len(getattr(self, name))
            if entries != self.num_layers:
                raise ValueError(f"{name}: got {entries} entries, allowed: num_layers = {self.num_layers}")
        if not self.index_layers or not self.index_layers[0]:
            raise ValueError("index_layers: the first layer has no selection to share, it must run its own indexer")
        if self.index.rope_start < 0:
            raise ValueError(f"index.rope_start: got {self.index.rope_start}, allowed: at least 0")
        if self.rope_dim % 2 or self.index.rope_start + self.rope_dim > self.index.head_dim:
            raise ValueError(
                f"rope_dim: got {self.rope_dim}, allowed: even, and with index.rope_start {self.index.rope_start} "
                f"at most index.head_dim {self.index.head_dim}"
            )
        moe = self.moe
        if any(self.moe_layers):
            if moe.num_groups < 1 or moe.num_experts % moe.num_groups or moe.num_experts // moe.num_groups < 2:
                raise ValueError(
                    f"moe.num_groups: got {moe.num_groups} for {moe.num_experts} experts, allowed: groups of equal "
                    "size, two or more experts each"
                )
            if not 1 <= moe.top_groups <= moe.num_groups:
                raise ValueError(f"moe.top_groups: got {moe.top_groups}, allowed: 1 to num_groups = {moe.num_groups}")
            reachable = moe.top_groups * (moe.num_experts // moe.num_groups)
            if not 1 <= moe.experts_per_token <= reachable:
                raise ValueError(f"moe.experts_per_token: got {moe.experts_per_token}, allowed: 1 to {reachable}")

    @property
    def qk_dim(self) -> int:
        """Width of one un-absorbed query head."""
        return self.nope_dim + self.rope_dim

    @property
    def latent_dim(self) -> int:
        """Width of an absorbed query head and of a cached row: the latent, then the rotated part."""
        return self.kv_lora + self.rope_dim

    @property
    def num_index_layers(self) -> int:
        return sum(self.index_layers)


def leading_dense(num_layers: int, num_dense: int) -> tuple[bool, ...]:
    """``moe_layers`` of a model whose first ``num_dense`` layers are dense.

    Args:
        num_layers: in all.
        num_dense: of them.

    Returns:
        Whether each layer is routed.
    """
    return tuple(layer >= num_dense for layer in range(num_layers))


def shared_index_layers(num_layers: int, frequency: int = 1, offset: int = 2) -> tuple[bool, ...]:
    """``index_layers`` where layer i runs its own indexer iff max(i - offset + 1, 0) is a multiple of ``frequency``.

    Args:
        num_layers: in all.
        frequency: see above.
        offset: see above.

    Returns:
        Whether each layer runs its own indexer.
    """
    return tuple(max(layer - offset + 1, 0) % max(frequency, 1) == 0 for layer in range(num_layers))


def deepseek_v32() -> Spec:
    """DeepSeek-V3.2."""
    return Spec(
        name="deepseek_v32",
        vocab_size=129280, hidden_size=7168, num_layers=61, num_heads=128,
        q_lora=1536, kv_lora=512, nope_dim=128, rope_dim=64, v_dim=128,
        index=IndexSpec(num_heads=64, head_dim=128, top_k=2048, rope_interleaved=False),
        moe=MoeSpec(num_experts=256, experts_per_token=8, num_groups=8, top_groups=4, routed_scale=2.5,
                    renormalise=True, num_shared=1, intermediate_size=2048),
        dense_intermediate_size=18432, moe_layers=leading_dense(61, 3), index_layers=shared_index_layers(61),
        max_positions=163840, rope_theta=1e4, softmax_scale=softmax_scale(192, 40.0, 1.0), yarn=YarnSpec(40.0, 4096),
        rms_eps=1e-6, eos_token_ids=(1,),
    )  # fmt: skip


def glm5(index_topk_freq: int = 1, index_skip_topk_offset: int = 2) -> Spec:
    """GLM-5; a frequency above 1 gives the shared indexers of its successors."""
    return Spec(
        name="glm5",
        vocab_size=154880, hidden_size=6144, num_layers=78, num_heads=64,
        q_lora=2048, kv_lora=512, nope_dim=192, rope_dim=64, v_dim=256,
        index=IndexSpec(num_heads=32, head_dim=128, top_k=2048, rope_interleaved=True),
        moe=MoeSpec(num_experts=256, experts_per_token=8, num_groups=1, top_groups=1, routed_scale=2.5,
                    renormalise=True, num_shared=1, intermediate_size=2048),
        dense_intermediate_size=12288, moe_layers=leading_dense(78, 3),
        index_layers=shared_index_layers(78, index_topk_freq, index_skip_topk_offset),
        max_positions=202752, rope_theta=1e6, softmax_scale=softmax_scale(256), rms_eps=1e-5,
        eos_token_ids=(154820, 154827, 154829),
    )  # fmt: skip


def tiny_v32() -> Spec:
    """A byte-level model of DeepSeek-V3.2's architecture: ids 0..255 are bytes, 256 ends a text."""
    return Spec(
        name="tiny_v32",
        vocab_size=257, hidden_size=128, num_layers=4, num_heads=8,
        q_lora=96, kv_lora=64, nope_dim=32, rope_dim=16, v_dim=32,
        index=IndexSpec(num_heads=4, head_dim=32, top_k=64, rope_interleaved=False),
        moe=MoeSpec(num_experts=8, experts_per_token=2, num_groups=4, top_groups=2, routed_scale=2.5, renormalise=True,
                    num_shared=1, intermediate_size=64),
        dense_intermediate_size=256, moe_layers=leading_dense(4, 1), index_layers=shared_index_layers(4),
        max_positions=8192, rope_theta=1e4, softmax_scale=softmax_scale(48, 40.0, 1.0), yarn=YarnSpec(40.0, 256),
        rms_eps=1e-6, eos_token_ids=(256,),
    )  # fmt: skip


def tiny_glm5() -> Spec:
    """A byte-level model of GLM-5's architecture, with shared index layers: ids 0..255 are bytes, 256 ends a text."""
    return Spec(
        name="tiny_glm5",
        vocab_size=257, hidden_size=128, num_layers=6, num_heads=4,
        q_lora=96, kv_lora=64, nope_dim=48, rope_dim=16, v_dim=64,
        index=IndexSpec(num_heads=2, head_dim=32, top_k=64, rope_interleaved=True),
        moe=MoeSpec(num_experts=8, experts_per_token=2, num_groups=1, top_groups=1, routed_scale=2.5, renormalise=True,
                    num_shared=1, intermediate_size=64),
        dense_intermediate_size=256, moe_layers=leading_dense(6, 1), index_layers=shared_index_layers(6, 3, 2),
        max_positions=8192, rope_theta=1e6, softmax_scale=softmax_scale(64), rms_eps=1e-5, eos_token_ids=(256,),
    )  # fmt: skip
