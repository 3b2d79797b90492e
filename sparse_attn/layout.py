"""Cache layouts: what the bytes of a cache mean, with encode and decode in plain torch.

A cache is a tensor of blocks, ``[num_blocks, block_size, row]``; a layout says what lies where inside a block. Every
reader and writer addresses a block by ``stride(0)``; the trailing dimension is a size, not a record, for planar
layouts.

A layout travels through op schemas as its ``name`` (a readable string); ``parse_layout`` turns it back.

Sources: byte positions of the 132-byte, 656-byte and 584-byte formats as vLLM 0.25 writes them and FlashMLA 9241ae3
reads them.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

import torch

from sparse_attn.fp8 import FP8_MAX, SCALE_RULES, exponent_of, fp8_decode, fp8_quantise, power_of
from sparse_attn.framework import checks
from sparse_attn.mxfp4 import GROUP, mxfp4_decode, mxfp4_quantise

PLAIN_DTYPE = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
PLAIN_NAME = {dtype: name for name, dtype in PLAIN_DTYPE.items()}
INDEX_AMAX_FLOOR = 1e-4
SCALE_BYTES = 4  # an fp32 scale, read as one word
# What a latent's scale is at least. vLLM 0.33 and FlashMLA clamp it before they round it up; vLLM 0.25, which rounds
# nothing, at LEAST_SCALE_FLOOR.
LEAST_SCALE_FLOOR = torch.finfo(torch.float32).tiny  # the smallest normal number
LATENT_SCALE_FLOOR = {"raw": LEAST_SCALE_FLOOR, "pow2": 1e-4}
PLANAR_AMAX_FLOOR = 1e-4
BF16_BYTES = 2


def _flat_block_offsets(cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    block_size = cache.shape[1]
    return slots // block_size, slots % block_size


def _scatter(cache: torch.Tensor, offsets: torch.Tensor, values: torch.Tensor) -> None:
    """Write values [n, width] at element ``offsets`` [n, width] of the memory that ``cache`` views."""
    flat = torch.as_strided(cache, (storage_extent(cache),), (1,))
    flat[offsets] = values


def _collect(cache: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    flat = torch.as_strided(cache, (storage_extent(cache),), (1,))
    return flat[offsets]


def storage_extent(cache: torch.Tensor) -> int:
    """Elements from the first to the last one that ``cache`` can reach."""
    if cache.numel() == 0:
        return 0
    (blocks, tokens, row), (block, token, value) = cache.shape, cache.stride()
    return 1 + (blocks - 1) * block + (tokens - 1) * token + (row - 1) * value


def _stored(values: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """``values`` as ``dtype``. Machines differ in what they convert NaN to: any becomes the one of all bits but the
    sign."""
    bits = values.to(dtype).view(torch.int32 if dtype == torch.float32 else torch.int16)
    return bits.masked_fill(values.isnan(), torch.iinfo(bits.dtype).max).view(dtype)


def _spans(cache: torch.Tensor, slots: torch.Tensor, block_offset: int, stride: int, width: int) -> torch.Tensor:
    """Element offsets [n, width] of a field that starts ``block_offset`` into its block and steps by ``stride`` per
    token."""
    block, token = _flat_block_offsets(cache, slots.long())
    start = block * cache.stride(0) + block_offset + token * stride
    return start.unsqueeze(-1) + torch.arange(width, device=cache.device)


def _check_groups(values: int, group: int, name: str = "latent") -> None:
    checks.check_at_least(name, values, 1)
    checks.check_at_least("group", group, 1)
    if values % group:
        raise ValueError(f"{name}: got {values}, allowed: multiples of the scale group {group}")


def _name() -> str:
    """A field that __post_init__ fills. It is a plain string, because Dynamo cannot format the numbers of a layout that
    is an argument of a compiled function."""
    return field(init=False, repr=False, compare=False)


@dataclass(frozen=True)
class PlainLayout:
    """Unquantised rows: ``latent`` values that are key and value, then ``rope`` values that are key alone.

    Attributes:
        dtype_name: "bf16", "fp16" or "fp32".
        latent: values of a row that are key and value.
        rope: values of a row that are key alone.
        name: what the operators' schemas call the layout.
    """

    dtype_name: str
    latent: int
    rope: int = 0
    name: str = _name()

    def __post_init__(self):
        checks.check_choice("dtype_name", self.dtype_name, PLAIN_DTYPE)
        checks.check_at_least("latent", self.latent, 1)
        checks.check_at_least("rope", self.rope, 0)
        object.__setattr__(self, "name", f"plain/{self.dtype_name}/{self.latent}+{self.rope}")

    @property
    def dim(self) -> int:
        return self.latent + self.rope

    @property
    def value_dim(self) -> int:
        """Leading values of a row that are its value in attention."""
        return self.latent

    @property
    def dtype(self) -> torch.dtype:
        return PLAIN_DTYPE[self.dtype_name]

    @property
    def row(self) -> int:
        return self.dim

    def encode(self, cache: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
        """Write fp32 ``values`` [n, dim] at ``slots`` [n], all of them valid."""
        block, token = _flat_block_offsets(cache, slots.long())
        cache[block, token] = _stored(values, self.dtype)

    def decode(self, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """fp32 [n, dim] of the tokens at ``slots`` [n], all of them valid."""
        block, token = _flat_block_offsets(cache, slots.long())
        return cache[block, token].float()


@dataclass(frozen=True)
class IndexFp8Layout:
    """Index keys, block-planar: a block's fp8 codes token after token, then its fp32 scales (132 bytes at dim 128).

    Token o of a block: codes at [o * dim, (o + 1) * dim), scale at block_size * dim + 4 * o.

    Attributes:
        dim: values of a key.
        flavour: "e4m3fn" or "e4m3fnuz".
        scale_rule: "pow2" or "raw".
        name: what the operators' schemas call the layout.
    """

    dim: int
    flavour: str = "e4m3fn"
    scale_rule: str = "pow2"
    name: str = _name()

    def __post_init__(self):
        checks.check_at_least("dim", self.dim, 1)
        checks.check_choice("flavour", self.flavour, FP8_MAX)
        checks.check_choice("scale_rule", self.scale_rule, SCALE_RULES)
        object.__setattr__(self, "name", f"index_fp8/{self.dim}/{self.flavour}/{self.scale_rule}")

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    @property
    def row(self) -> int:
        return self.dim + 4

    def _fields(self, cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (
            _spans(cache, slots, 0, self.dim, self.dim),
            _spans(cache, slots, cache.shape[1] * self.dim, 4, 4),
        )

    def encode(self, cache: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
        codes, scales = fp8_quantise(values, self.flavour, self.scale_rule, INDEX_AMAX_FLOOR)
        code_at, scale_at = self._fields(cache, slots)
        _scatter(cache, code_at, codes)
        _scatter(cache, scale_at, scales.unsqueeze(-1).view(torch.uint8))

    def decode_parts(self, cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(codes uint8 [n, dim], scales fp32 [n]) of the tokens at ``slots``."""
        code_at, scale_at = self._fields(cache, slots)
        return _collect(cache, code_at), _collect(cache, scale_at).view(torch.float32).squeeze(-1)

    def decode(self, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        codes, scales = self.decode_parts(cache, slots)
        return fp8_decode(codes, self.flavour) * scales.unsqueeze(-1)


@dataclass(frozen=True)
class IndexMxfp4Layout:
    """Index keys, block-planar: a block's e2m1 codes token after token, two a byte, then its ue8m0 scales (68 bytes at
    dim 128).

    Token o of a block: codes at [o * code_bytes, (o + 1) * code_bytes), the even value of a byte in its low bits;
    scales at block_size * code_bytes + o * groups, one for every 32 values. sparse_attn.mxfp4 says how values are
    rounded. A token's queries are a block of this layout, whose tokens are its heads.

    Attributes:
        dim: values of a key, a multiple of 32.
        name: what the operators' schemas call the layout.
    """

    dim: int
    name: str = _name()

    def __post_init__(self):
        _check_groups(self.dim, GROUP, "dim")
        object.__setattr__(self, "name", f"index_mxfp4/{self.dim}")

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    @property
    def code_bytes(self) -> int:
        """Bytes from one token's codes to the next one's."""
        return self.dim // 2

    @property
    def groups(self) -> int:
        """Scale bytes of a token."""
        return self.dim // GROUP

    @property
    def row(self) -> int:
        return self.code_bytes + self.groups

    def _fields(self, cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        plane = cache.shape[1] * self.code_bytes
        return (
            _spans(cache, slots, 0, self.code_bytes, self.code_bytes),
            _spans(cache, slots, plane, self.groups, self.groups),
        )

    def encode(self, cache: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
        codes, scales = mxfp4_quantise(values)
        code_at, scale_at = self._fields(cache, slots)
        _scatter(cache, code_at, codes)
        _scatter(cache, scale_at, scales)

    def decode_parts(self, cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(codes uint8 [n, code_bytes], scales ue8m0 bytes [n, groups]) of the tokens at ``slots``."""
        code_at, scale_at = self._fields(cache, slots)
        return _collect(cache, code_at), _collect(cache, scale_at)

    def decode(self, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        return mxfp4_decode(*self.decode_parts(cache, slots))


@dataclass(frozen=True)
class LatentFp8Layout:
    """MLA latents, interleaved per token: fp8 latent, its fp32 group scales, bf16 rope (656 bytes at 512 + 64).

    Attributes:
        latent: fp8 values of a token, which are key and value.
        rope: bf16 values behind them, which are key alone.
        group: values of a scale.
        flavour: "e4m3fn" or "e4m3fnuz".
        scale_rule: "raw" or "pow2".
        scale_floor: the least scale, before it is rounded up under "pow2"; None: LATENT_SCALE_FLOOR of the rule.
        name: what the operators' schemas call the layout.
    """

    latent: int
    rope: int
    group: int = 128
    flavour: str = "e4m3fn"
    scale_rule: str = "raw"
    scale_floor: float | None = None
    name: str = _name()

    def __post_init__(self):
        _check_groups(self.latent, self.group)
        checks.check_at_least("rope", self.rope, 0)
        checks.check_choice("flavour", self.flavour, FP8_MAX)
        checks.check_choice("scale_rule", self.scale_rule, SCALE_RULES)
        if self.latent % SCALE_BYTES:
            raise ValueError(
                f"latent: got {self.latent}, allowed: multiples of {SCALE_BYTES}, fp32 scales stand behind it"
            )
        if self.row % SCALE_BYTES:
            raise ValueError(f"rope: got {self.rope}, allowed: even numbers, fp32 scales stand in the next record")
        name = f"latent_fp8/{self.latent}+{self.rope}/{self.group}/{self.flavour}/{self.scale_rule}"
        usual = LATENT_SCALE_FLOOR[self.scale_rule]
        if self.scale_floor is not None and not LEAST_SCALE_FLOOR <= self.scale_floor <= 1:
            raise ValueError(f"scale_floor: got {self.scale_floor}, allowed: {LEAST_SCALE_FLOOR} to 1")
        if self.scale_floor == usual:
            object.__setattr__(self, "scale_floor", None)
        elif self.scale_floor is not None:
            name += f"/{float(self.scale_floor)!r}"
        object.__setattr__(self, "name", name)

    @property
    def dim(self) -> int:
        return self.latent + self.rope

    @property
    def value_dim(self) -> int:
        return self.latent

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    @property
    def amax_floor(self) -> float:
        """The least value that a group's amax counts as, so that its scale is not below the floor."""
        floor = LATENT_SCALE_FLOOR[self.scale_rule] if self.scale_floor is None else self.scale_floor
        return FP8_MAX[self.flavour] * floor

    @property
    def groups(self) -> int:
        return self.latent // self.group

    @property
    def scale_offset(self) -> int:
        """Byte offset of the group scales inside a token's record."""
        return self.latent

    @property
    def rope_offset(self) -> int:
        """Byte offset of the bf16 rope part inside a token's record."""
        return self.latent + 4 * self.groups

    @property
    def row(self) -> int:
        return self.rope_offset + 2 * self.rope

    def encode(self, cache: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
        rows = values.shape[0]
        grouped = values[:, : self.latent].reshape(rows, self.groups, self.group)
        codes, scales = fp8_quantise(grouped, self.flavour, self.scale_rule, self.amax_floor)
        rope = _stored(values[:, self.latent :], torch.bfloat16).contiguous()
        record = torch.cat([codes.flatten(1), scales.view(torch.uint8), rope.view(torch.uint8)], dim=1)
        block, token = _flat_block_offsets(cache, slots.long())
        cache[block, token] = record

    def decode(self, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        block, token = _flat_block_offsets(cache, slots.long())
        record = cache[block, token]
        codes = record[:, : self.latent].reshape(-1, self.groups, self.group)
        scales = record[:, self.scale_offset : self.rope_offset].contiguous().view(torch.float32)
        latent = (fp8_decode(codes, self.flavour) * scales.unsqueeze(-1)).flatten(1)
        rope = record[:, self.rope_offset :].contiguous().view(torch.bfloat16).float()
        return torch.cat([latent, rope], dim=1)


@dataclass(frozen=True)
class PlanarFp8Layout:
    """Keys that are values in full, block-planar: per token fp8 ``latent`` and bf16 ``rope`` values, and behind a
    block's tokens their ue8m0 group scales (584 bytes a token at 448 + 64).

    Token o of a block: codes at o * token_bytes, rope behind them; scale bytes at block_size * token_bytes + o *
    scale_bytes, one per group, then padding, written 0. Values are rounded to bf16 before a group's amax is taken.

    Attributes:
        latent: fp8 values of a token.
        rope: bf16 values behind them.
        group: values of a scale.
        flavour: "e4m3fn" or "e4m3fnuz".
        name: what the operators' schemas call the layout.
    """

    latent: int
    rope: int
    group: int = 64
    flavour: str = "e4m3fn"

    scale_rule = "pow2"
    amax_floor = PLANAR_AMAX_FLOOR

    name: str = _name()

    def __post_init__(self):
        _check_groups(self.latent, self.group)
        checks.check_at_least("rope", self.rope, 0)
        checks.check_choice("flavour", self.flavour, FP8_MAX)
        if self.latent % BF16_BYTES:
            raise ValueError(f"latent: got {self.latent}, allowed: even numbers, bf16 values stand behind it")
        object.__setattr__(self, "name", f"planar_fp8/{self.latent}+{self.rope}/{self.group}/{self.flavour}")

    @property
    def dim(self) -> int:
        return self.latent + self.rope

    @property
    def value_dim(self) -> int:
        return self.dim

    @property
    def dtype(self) -> torch.dtype:
        return torch.uint8

    @property
    def groups(self) -> int:
        return self.latent // self.group

    @property
    def rope_offset(self) -> int:
        """Byte offset of the bf16 rope part behind the start of a token's codes."""
        return self.latent

    @property
    def token_bytes(self) -> int:
        """Bytes from one token's codes to the next one's."""
        return self.latent + BF16_BYTES * self.rope

    @property
    def scale_bytes(self) -> int:
        """Bytes from one token's scales to the next one's: the groups, rounded up to a multiple of 8."""
        return -(-self.groups // 8) * 8

    @property
    def row(self) -> int:
        return self.token_bytes + self.scale_bytes

    def block_stride(self, block_size: int) -> int:
        """Bytes from block to block as allocated: rounded up to a multiple of ``token_bytes``."""
        return -(-block_size * self.row // self.token_bytes) * self.token_bytes

    def _fields(self, cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        plane = cache.shape[1] * self.token_bytes
        return (
            _spans(cache, slots, 0, self.token_bytes, self.token_bytes),
            _spans(cache, slots, plane, self.scale_bytes, self.scale_bytes),
        )

    def encode(self, cache: torch.Tensor, slots: torch.Tensor, values: torch.Tensor) -> None:
        rounded = values.to(torch.bfloat16)
        grouped = rounded[:, : self.latent].reshape(-1, self.groups, self.group)
        codes, scales = fp8_quantise(grouped, self.flavour, self.scale_rule, self.amax_floor)
        rope = _stored(rounded[:, self.latent :], torch.bfloat16).contiguous().view(torch.uint8)
        exponents = torch.nn.functional.pad(exponent_of(scales), (0, self.scale_bytes - self.groups))
        token_at, scale_at = self._fields(cache, slots)
        _scatter(cache, token_at, torch.cat([codes.flatten(1), rope], dim=1))
        _scatter(cache, scale_at, exponents)

    def decode(self, cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        token_at, scale_at = self._fields(cache, slots)
        token, scales = _collect(cache, token_at), power_of(_collect(cache, scale_at)[:, : self.groups])
        codes = token[:, : self.latent].reshape(-1, self.groups, self.group)
        latent = (fp8_decode(codes, self.flavour) * scales.unsqueeze(-1)).flatten(1)
        rope = token[:, self.rope_offset :].contiguous().view(torch.bfloat16).float()
        return torch.cat([latent, rope], dim=1)


KvLayout = PlainLayout | LatentFp8Layout | PlanarFp8Layout
IndexLayout = IndexFp8Layout | IndexMxfp4Layout | PlainLayout
Layout = KvLayout | IndexLayout


def parse_kv_layout(name: str) -> KvLayout:
    """The layout that a name stands for; ValueError for one of index keys, which attention does not read."""
    layout = parse_layout(name)
    if isinstance(layout, (IndexFp8Layout, IndexMxfp4Layout)):
        raise ValueError(f"layout: got {name!r}, allowed: plain, latent_fp8 or planar_fp8")
    return layout


@functools.cache
def parse_layout(name: str) -> Layout:
    """The layout a name stands for; ValueError where it stands for none."""
    if not isinstance(name, str):
        raise TypeError(f"layout: got {type(name).__name__}, allowed: a name")
    kind, _, rest = name.partition("/")
    try:
        if kind == "plain":
            dtype_name, dims = rest.split("/")
            latent, rope = map(int, dims.split("+"))
            return PlainLayout(dtype_name, latent, rope)
        if kind == "index_fp8":
            dim, flavour, rule = rest.split("/")
            return IndexFp8Layout(int(dim), flavour, rule)
        if kind == "index_mxfp4":
            return IndexMxfp4Layout(int(rest))
        if kind == "latent_fp8":
            dims, group, flavour, rule, *floor = rest.split("/", 4)
            latent, rope = map(int, dims.split("+"))
            scale_floor = float(floor[0]) if floor else None
            return LatentFp8Layout(latent, rope, int(group), flavour, rule, scale_floor)
        if kind == "planar_fp8":
            dims, group, flavour = rest.split("/")
            latent, rope = map(int, dims.split("+"))
            return PlanarFp8Layout(latent, rope, int(group), flavour)
    except ValueError as error:
        raise ValueError(f"layout: got {name!r}: {error}") from None
    raise ValueError(f"layout: got {name!r}, allowed kinds: plain, index_fp8, index_mxfp4, latent_fp8, planar_fp8")


def row_stride(cache: torch.Tensor, layout: Layout) -> int:
    """Elements from one token's record to the next one's in a block of ``cache``; of one token, as if there were more.
    Records of planar blocks are always side by side."""
    if isinstance(layout, (PlainLayout, LatentFp8Layout)):
        return cache.stride(1) if cache.shape[1] > 1 else layout.row
    if isinstance(layout, IndexMxfp4Layout):
        return layout.code_bytes
    return layout.token_bytes if isinstance(layout, PlanarFp8Layout) else layout.dim


def query_row(layout: Layout) -> int:
    """Elements of one head's index query for keys of ``layout``: its values, and under MXFP4 their scales."""
    return layout.row if isinstance(layout, IndexMxfp4Layout) else layout.dim
