"""Models that attend to a window of raw keys and to compressed entries: DeepSeek-V4.

Sources: the config.json files DeepSeek publishes, and transformers 5.17's DeepseekV4Config and its modelling code.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sparse_attn.spec.parts import IndexSpec, MoeSpec, YarnSpec

LAYER_KINDS = ("window", "indexed", "full")
PUBLISHED_RATIOS = {0: "window", 4: "indexed", 128: "full"}


@dataclass(frozen=True)
class CompressedSpec:
    """Everything the forward needs. Every layer attends to the last ``window`` raw keys, and by ``layer_kinds[i]`` to

    - "window": nothing else,
    - "indexed": the entries an indexer selects, each pooled over two overlapping windows of ``indexed_ratio`` tokens,
    - "full": all entries, each pooled over ``full_ratio`` tokens.

    A key is its own value, all head_dim of it; the last rope_dim values are rotated. Rope: ``rope_theta`` without yarn
    in window layers, ``compressed_rope_theta`` with ``yarn`` in the others. hash_layers[i]: the layer's experts follow
    from the token id. streams: residual streams; sinkhorn_iterations and hyper_eps belong to their mixing.
    """

    name: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    q_lora: int
    head_dim: int
    rope_dim: int
    window: int
    layer_kinds: tuple[str, ...]
    index: IndexSpec
    moe: MoeSpec
    hash_layers: tuple[bool, ...]
    o_groups: int
    o_lora: int
    max_positions: int
    rope_theta: float
    compressed_rope_theta: float
    softmax_scale: float
    yarn: YarnSpec | None = None
    indexed_ratio: int = 4
    full_ratio: int = 128
    streams: int = 4
    sinkhorn_iterations: int = 20
    hyper_eps: float = 1e-6
    rms_eps: float = 1e-6
    tie_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = field(default=())

    def __post_init__(self):
        for name in ("layer_kinds", "hash_layers"):
            entries = len(getattr(self, name))
            if entries != self.num_layers:
                raise ValueError(f"{name}: got {entries} entries, allowed: num_layers = {self.num_layers}")
        if not set(self.layer_kinds) <= set(LAYER_KINDS):
            raise ValueError(f"layer_kinds: got {sorted(set(self.layer_kinds))}, allowed: {', '.join(LAYER_KINDS)}")
        if self.rope_dim % 2 or not 0 < self.rope_dim < self.head_dim:
            raise ValueError(f"rope_dim: got {self.rope_dim}, allowed: even, below head_dim = {self.head_dim}")
        if self.rope_dim > self.index.head_dim:
            raise ValueError(f"rope_dim: got {self.rope_dim}, allowed: at most index.head_dim = {self.index.head_dim}")
        if not 0 <= self.index.rope_start <= self.index.head_dim - self.rope_dim:
            raise ValueError(
                f"index.rope_start: got {self.index.rope_start}, allowed: 0 to index.head_dim - rope_dim = "
                f"{self.index.head_dim - self.rope_dim}"
            )
        if self.o_groups < 1 or self.num_heads % self.o_groups:
            raise ValueError(f"o_groups: got {self.o_groups}, allowed: a divisor of num_heads = {self.num_heads}")
        if not 1 <= self.moe.experts_per_token <= self.moe.num_experts:
            raise ValueError(
                f"moe.experts_per_token: got {self.moe.experts_per_token}, "
                f"allowed: 1 to num_experts = {self.moe.num_experts}"
            )
        for name in ("window", "indexed_ratio", "full_ratio", "streams", "sinkhorn_iterations"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: got {getattr(self, name)}, allowed: at least 1")

    @property
    def nope_dim(self) -> int:
        """Leading values of a key that are not rotated."""
        return self.head_dim - self.rope_dim

    @property
    def ratios(self) -> tuple[int, ...]:
        """Compression ratios in use, ascending."""
        by_kind = {"indexed": self.indexed_ratio, "full": self.full_ratio}
        return tuple(sorted({by_kind[kind] for kind in self.layer_kinds if kind != "window"}))

    def ratio(self, layer: int) -> int:
        """Tokens an entry of ``layer`` stands for; 0 where the layer has none."""
        return {"window": 0, "indexed": self.indexed_ratio, "full": self.full_ratio}[self.layer_kinds[layer]]


def kinds_of_ratios(ratios: list[int]) -> tuple[str, ...]:
    """``layer_kinds`` of a published compress_ratios list."""
    unknown = sorted(set(ratios) - set(PUBLISHED_RATIOS))
    if unknown:
        raise ValueError(f"config compress_ratios: got {unknown}, allowed: {', '.join(map(str, PUBLISHED_RATIOS))}")
    return tuple(PUBLISHED_RATIOS[ratio] for ratio in ratios)


def first_layers(num_layers: int, count: int) -> tuple[bool, ...]:
    """``hash_layers`` of a model whose first ``count`` layers are routed by token id."""
    return tuple(layer < count for layer in range(num_layers))


def deepseek_v4_flash() -> CompressedSpec:
    """DeepSeek-V4 Flash."""
    return CompressedSpec(
        name="deepseek_v4_flash",
        vocab_size=129280, hidden_size=4096, num_layers=43, num_heads=64,
        q_lora=1024, head_dim=512, rope_dim=64, window=128,
        layer_kinds=kinds_of_ratios([0, 0] + [4, 128] * 20 + [4]),
        index=IndexSpec(num_heads=64, head_dim=128, top_k=512, rope_interleaved=True, rope_start=64),
        moe=MoeSpec(num_experts=256, experts_per_token=6, num_groups=1, top_groups=1, routed_scale=1.5,
                    renormalise=True, num_shared=1, intermediate_size=2048, score="sqrtsoftplus", clamp=10.0),
        hash_layers=first_layers(43, 3), o_groups=8, o_lora=1024,
        max_positions=1048576, rope_theta=1e4, compressed_rope_theta=1.6e5, softmax_scale=512**-0.5,
        yarn=YarnSpec(16.0, 65536), eos_token_ids=(1,),
    )  # fmt: skip


def deepseek_v4_pro() -> CompressedSpec:
    """DeepSeek-V4 Pro."""
    return CompressedSpec(
        name="deepseek_v4_pro",
        vocab_size=129280, hidden_size=7168, num_layers=61, num_heads=128,
        q_lora=1536, head_dim=512, rope_dim=64, window=128,
        layer_kinds=kinds_of_ratios([128, 128] + [4, 128] * 29 + [4]),
        index=IndexSpec(num_heads=64, head_dim=128, top_k=1024, rope_interleaved=True, rope_start=64),
        moe=MoeSpec(num_experts=384, experts_per_token=6, num_groups=1, top_groups=1, routed_scale=2.5,
                    renormalise=True, num_shared=1, intermediate_size=3072, score="sqrtsoftplus", clamp=10.0),
        hash_layers=first_layers(61, 3), o_groups=16, o_lora=1024,
        max_positions=1048576, rope_theta=1e4, compressed_rope_theta=1.6e5, softmax_scale=512**-0.5,
        yarn=YarnSpec(16.0, 65536), eos_token_ids=(1,),
    )  # fmt: skip


def tiny_v4() -> CompressedSpec:
    """A byte-level model of DeepSeek-V4's architecture with all three kinds of layer: ids 0..255 are bytes, 256 ends a
    text."""
    return CompressedSpec(
        name="tiny_v4",
        vocab_size=257, hidden_size=128, num_layers=5, num_heads=4,
        q_lora=96, head_dim=64, rope_dim=16, window=32,
        layer_kinds=("window", "indexed", "full", "indexed", "full"),
        index=IndexSpec(num_heads=4, head_dim=32, top_k=32, rope_interleaved=True, rope_start=16),
        moe=MoeSpec(num_experts=8, experts_per_token=2, num_groups=1, top_groups=1, routed_scale=1.5, renormalise=True,
                    num_shared=1, intermediate_size=64, score="sqrtsoftplus", clamp=10.0),
        hash_layers=first_layers(5, 1), o_groups=2, o_lora=64,
        max_positions=8192, rope_theta=1e4, compressed_rope_theta=1.6e5, softmax_scale=64**-0.5,
        yarn=YarnSpec(16.0, 512), eos_token_ids=(256,),
    )  # fmt: skip
