"""What property tests are made of: hostile values and strides, calls that can be repeated, moved and spoilt."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from support.caches import poison
from support.extremes import INT_MAX, INT_MIN

from sparse_attn.layout import Layout, PlanarFp8Layout

WILD = (INT_MIN, INT_MIN + 1, -2, -1, INT_MAX - 1, INT_MAX)
INF = math.inf
EXAMPLES = int(os.environ.get("SPARSE_ATTN_EXAMPLES", "0"))


def hostile(few: int) -> settings:
    """``few`` examples, the same in every run; SPARSE_ATTN_EXAMPLES, where it is set, and new ones in every run. On a
    GPU a third of them, because nearly every example compiles kernels of its own."""
    few = max(3, few // 3) if torch.cuda.is_available() else few
    return settings(
        max_examples=EXAMPLES or few, derandomize=not EXAMPLES, deadline=None, database=None,
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip


@dataclass
class Call:
    """A call of a public function. writes: arguments it may change. level: bound on a result's distance from the
    oracle's, absolute and relative; None: equal. loose: the same for kernels against the reference."""

    function: Callable
    arguments: dict[str, object]
    writes: tuple[str, ...] = ()
    level: tuple[float, float] | None = None
    loose: tuple[float, float] | None = field(default=None)

    def __repr__(self):
        def shown(value):
            if isinstance(value, torch.Tensor):
                return (
                    f"{str(value.dtype)[6:]}{list(value.shape)}/{list(value.stride())}={value.flatten()[:40].tolist()}"
                )
            if isinstance(value, tuple) and hasattr(value, "_fields"):
                return type(value).__name__ + str({name: shown(part) for name, part in value._asdict().items()})
            return repr(value)

        return f"{self.function.__name__}({', '.join(f'{k}={shown(v)}' for k, v in self.arguments.items())})"

    def fresh(self, device: torch.device | str = "cpu") -> Call:
        """The same call on memory of its own; what shares memory goes on sharing it."""
        storages: dict[int, torch.UntypedStorage] = {}

        def copy(value):
            if isinstance(value, tuple) and hasattr(value, "_fields"):
                return type(value)(*map(copy, value))
            if not isinstance(value, torch.Tensor) or value.device.type == "meta":
                return value
            storage = value.untyped_storage()
            if storage.data_ptr() not in storages:
                flat = torch.empty(0, dtype=torch.uint8).set_(storage).clone().to(device)
                storages[storage.data_ptr()] = flat.untyped_storage()
            memory = storages[storage.data_ptr()]
            return torch.empty(0, dtype=value.dtype, device=device).set_(
                memory, value.storage_offset(), value.shape, value.stride()
            )

        arguments = {name: copy(value) for name, value in self.arguments.items()}
        return Call(self.function, arguments, self.writes, self.level, self.loose)

    def run(self, impl: str | None):
        return self.function(**self.arguments, **({} if impl is None else dict(impl=impl)))

    def memory(self, name: str) -> torch.Tensor:
        """All bytes of the memory that an argument lies in."""
        return torch.empty(0, dtype=torch.uint8).set_(self.arguments[name].untyped_storage().cpu())

    def tensors(self) -> dict[str, torch.Tensor]:
        """Every tensor by its name, as errors spell it: ``ragged.indices``."""
        found = {}
        for name, value in self.arguments.items():
            if isinstance(value, torch.Tensor):
                found[name] = value
            elif isinstance(value, tuple) and hasattr(value, "_fields"):
                parts = value._asdict().items()
                found |= {f"{name}.{part}": inner for part, inner in parts if isinstance(inner, torch.Tensor)}
        return found

    def replaced(self, name: str, value: object) -> Call:
        """The call with another tensor under a name of ``tensors``."""
        whole, _, part = name.partition(".")
        value = self.arguments[whole]._replace(**{part: value}) if part else value
        return Call(self.function, self.arguments | {whole: value}, self.writes, self.level, self.loose)


def pieces(result) -> list[torch.Tensor]:
    if result is None:
        return []
    if isinstance(result, torch.Tensor):
        return [result]
    return [piece for part in result if isinstance(part, (torch.Tensor, tuple)) for piece in pieces(part)]


def assert_same(got, want, level: tuple[float, float] | None) -> None:
    """Results of equal form: NaN and infinities in the same places, the rest within ``level`` (absolute or
    relative)."""
    got, want = pieces(got), pieces(want)
    assert len(got) == len(want)
    for mine, theirs in zip(got, want):
        mine = mine.cpu()
        assert mine.shape == theirs.shape, (mine.shape, theirs.shape)
        if level is None or not mine.is_floating_point():
            torch.testing.assert_close(mine, theirs.to(mine.dtype), rtol=0, atol=0, equal_nan=True)
            continue
        mine, theirs = mine.double(), theirs.double()
        for kind in (torch.isnan, torch.isposinf, torch.isneginf):
            assert torch.equal(kind(mine), kind(theirs)), f"{kind.__name__}: {mine} against {theirs}"
        error = (mine - theirs).abs()
        bad = torch.isfinite(theirs) & (error > level[0]) & (error > level[1] * theirs.abs())
        assert not bad.any(), f"{mine[bad][:8]} against {theirs[bad][:8]}"


# Values. Index values are drawn one by one, so that failures shrink; floats come from a seed.


def some(draw, low: int, high: int) -> int:
    return draw(st.integers(low, high))


def flag(draw) -> bool:
    return draw(st.booleans())


def ints(draw, shape, low: int, high: int, dtype=torch.int32, wild=WILD) -> torch.Tensor:
    """Mostly within [low, high], some as wild as can be."""
    inside = st.integers(low, max(low, high))
    value = st.one_of(inside, inside, inside, st.sampled_from(wild)) if wild else inside
    count = math.prod(shape)
    drawn = draw(st.lists(value, min_size=count, max_size=count))
    return torch.tensor(drawn, dtype=dtype).reshape(shape)


def floats(draw, shape, dtype=torch.float32, scale: float = 1.0, spoilt: tuple[float, ...] = ()) -> torch.Tensor:
    """Normal values; sometimes of a few levels, with many equal ones; with ``spoilt`` a tenth of them that."""
    generator = torch.Generator().manual_seed(some(draw, 0, 2**20))
    values = torch.randn(shape, generator=generator) * scale
    if flag(draw):
        values = (values * 2).round() / 2
    if spoilt and flag(draw):
        which = torch.randint(0, 10 * len(spoilt), shape, generator=generator)
        for number, value in enumerate(spoilt):
            values = torch.where(which == number, value, values)
    return values.to(dtype)


def codes(draw, shape, nan: bool = False) -> torch.Tensor:
    """fp8 codes, NaN (0x7F, 0xFF, 0x80) only if wanted."""
    generator = torch.Generator().manual_seed(some(draw, 0, 2**20))
    values = torch.randint(0, 256, shape, generator=generator, dtype=torch.uint8)
    if not nan:
        values = torch.where((values & 0x7F == 0x7F) | (values == 0x80), 0x35, values)
    return values


def monotone(draw, count: int, high: int) -> torch.Tensor:
    """int32 [count + 1] from 0 on."""
    steps = draw(st.lists(st.integers(0, high), min_size=count, max_size=count))
    return torch.tensor([0, *steps], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def amid(draw, tensor: torch.Tensor | None, free: bool = False) -> torch.Tensor | None:
    """The same values as a view of larger memory full of poison; ``free``: the last dimension need not be
    contiguous."""
    if tensor is None or not flag(draw):
        return tensor
    before = [some(draw, 0, 2) for _ in tensor.shape]
    steps = [some(draw, 1, 2) for _ in tensor.shape]
    if not free and steps:
        steps[-1] = 1
    wide = [size * step + start + 1 for size, step, start in zip(tensor.shape, steps, before)]
    memory = torch.full(wide, poison(tensor.dtype), dtype=tensor.dtype)
    if free and tensor.dim() > 1 and flag(draw):
        memory = memory.transpose(0, -1).contiguous().transpose(0, -1)
    view = memory[tuple(slice(b, b + n * s, s) for n, s, b in zip(tensor.shape, steps, before))]
    view.copy_(tensor)
    return view


def blocks(draw, layout: Layout, count: int, block_size: int, fill: bool = True) -> torch.Tensor:
    """A cache whose blocks stand apart amid canaries; filled with decodable values, or with canaries too."""
    unit = 16 if layout.dtype == torch.uint8 else 4
    gap = unit * some(draw, 0, 2)
    row = block_size * layout.row
    pitch = -(-row // 4) * 4 + gap
    memory = torch.full((count + 2, pitch), poison(layout.dtype), dtype=layout.dtype)
    cache = memory[1:-1, :row].unflatten(1, (block_size, layout.row)) if count else memory[:0, :row].reshape(
        0, block_size, layout.row
    )  # fmt: skip
    if fill and count:
        slots = torch.arange(count * block_size)
        spread = 30.0 if isinstance(layout, PlanarFp8Layout) else 1.0
        layout.encode(cache, slots, floats(draw, (len(slots), layout.dim), scale=spread))
    return cache
