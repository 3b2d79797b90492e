"""A CTA of sm_90 with its warps, shared memory, barriers, copies and products."""

from __future__ import annotations

import operator
import random
import re
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from support.ptx.arithmetic import BITS32, Lanes, compute, from_bf16, packed, typed
from support.ptx.program import Instruction, Program, names

SHARED_AT, SHARED_BYTES = 1024, 232448
GLOBAL_AT = 1 << 20
LANES = np.arange(32)
DIRT = 0xAB  # what shared memory holds at first
PEER_SHIFT = 24  # bits of an address in shared memory
CHANGES: dict[str, Callable[[int, int], int]] = {"add": operator.add, "min": min, "or": operator.or_}  # of unsigned
NOTHING = {"prefetch", "setmaxnreg", "fence", "griddepcontrol", "nanosleep", "membar"}  # as everything happens in order
FP8 = {
    kind: torch.arange(256, dtype=torch.uint8).view(dtype).double().numpy()
    for kind, dtype in (("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2))
}


class TensorMap(NamedTuple):
    """Of a tensor in global memory at ``address``; sizes and strides of its elements, the last dimension's last."""

    address: int
    shape: list[int]
    strides: list[int]
    box: list[int]
    itemsize: int
    swizzle: int


class Barrier:
    """An mbarrier."""

    def __init__(self, count: int):
        self.count, self.pending, self.phase, self.expected = count, count, 0, 0

    def arrive(self, arrivals: int, expected: int) -> None:
        self.expected += expected
        self.pending -= arrivals
        assert self.pending >= 0, "more arrivals than a phase has"
        if self.pending == 0 and self.expected == 0:
            self.phase, self.pending = self.phase ^ 1, self.count


class Warp:
    def __init__(self, number: int):
        self.number = number
        self.at = np.zeros(32, np.int64)  # the next instruction of every lane
        self.registers: dict[str, Lanes] = {
            "%tid.x": (LANES + 32 * number).astype(np.uint64),
            "%laneid": LANES.astype(np.uint64),
        }
        self.waits = self.ended = False
        self.products: list[Callable[[], None]] = []  # wgmma that may still have to run, of no group yet
        self.groups: list[list[Callable[[], None]]] = []
        self.meetings = 0  # of its cluster, at which it has arrived


class Cta:
    """parameters: values by name; of tensor maps a number that ``maps`` has. Its cluster is itself alone, if none is
    given."""

    def __init__(
        self,
        program: Program,
        memory: np.ndarray,
        parameters: dict[str, int],
        maps: dict[int, TensorMap],
        place: tuple[int, ...],
        grid: tuple[int, ...],
        seed: int,
    ):
        self.program, self.memory, self.maps = program, memory, maps
        self.shared = np.full(SHARED_AT + SHARED_BYTES, DIRT, np.uint8)
        self.barriers: dict[int, Barrier] = {}
        self.arrived: dict[int, list[Warp]] = {}  # at bar.sync
        self.random = random.Random(seed)
        self.warps = [Warp(number) for number in range(program.threads // 32)]
        places = {
            f"%{name}.{axis}": at for name, of in (("ctaid", place), ("nctaid", grid)) for axis, at in zip("xyz", of)
        }
        self.known = parameters | places | _placed(program.shared)
        self.issued = 0
        self.sent: list[tuple[int, int, bytes]] = []  # to other CTAs, and not there yet: address, barrier, data
        self.join([self])

    def join(self, cluster: list[Cta]) -> None:
        """Be the next of ``cluster``, whose CTAs all join it."""
        self.cluster, rank = cluster, cluster.index(self)
        number = self.known["%ctaid.x"] // len(cluster)
        self.known |= {"%cluster_ctarank": rank, "%clusterid.x": number}

    def run(self) -> None:
        """The cluster, until all warps have ended."""
        idle = 0
        warps = [(cta, warp) for cta in self.cluster for warp in cta.warps]
        while live := [(cta, warp) for cta, warp in warps if not warp.ended]:
            ready = [(cta, warp) for cta, warp in live if not warp.waits]
            assert ready and idle < 5000, f"no warp goes on: {[cta._where(warp) for cta, warp in live]}"
            self.random.shuffle(ready)
            before = sum(cta.issued for cta in self.cluster)
            for cta, warp in ready:
                turn = self.random.choice((20, 500, 20000))
                while turn and not (warp.waits or warp.ended) and cta._step(warp):
                    turn -= 1
                for sender in self.cluster:
                    sender.deliver()
            idle = 0 if sum(cta.issued for cta in self.cluster) - before > 3 * len(ready) else idle + 1
        assert not any(cta.sent for cta in self.cluster), "nobody waited for what was sent"

    def _where(self, warp: Warp) -> str:
        return f"{warp.number}: {self.program.instructions[int(warp.at.min())].text[:80]}"

    def _step(self, warp: Warp) -> bool:
        """Execute the first of the lanes' next instructions; False where the warp waits."""
        place = int(warp.at.min())
        if place == len(self.program.instructions):
            warp.ended = True
            return True
        instruction = self.program.instructions[place]
        active = here = warp.at == place
        warp.at = np.where(here, place + 1, warp.at)
        self.issued += 1
        if instruction.guard is not None:
            active = here & ((self._value(warp, instruction.guard) != 0) ^ instruction.negated)
        name = instruction.operation[0]
        if name in NOTHING or instruction.operation[:2] == ("bar", "warp"):
            return True
        if execute := getattr(self, f"_{name}", None):
            return execute(warp, instruction, active) is not False
        if active.any():
            assert not any("[" in operand for operand in instruction.operands), f"not known: {instruction.text}"
            values = [self._value(warp, operand) for operand in instruction.operands[1:]]
            self._set(warp, instruction.operands[0], compute(instruction.operation, values), active)
        return True

    # --- registers and memory

    def _value(self, warp: Warp, operand: str) -> Lanes:
        if operand in warp.registers:
            return warp.registers[operand]
        if operand in self.known:
            value = self.known[operand]
        elif operand.startswith("0f"):
            value = int(operand[2:], 16)
        elif re.match(r"-?\d", operand):
            value = int(operand.removesuffix("U"), 0)
        else:
            assert operand.startswith("%"), operand
            value = 0  # a register that was never set
        return np.full(32, value & 0xFFFFFFFFFFFFFFFF, np.uint64)

    def _set(self, warp: Warp, register: str, value: Lanes, active: np.ndarray) -> None:
        before = warp.registers.get(register)
        warp.registers[register] = np.where(active, value, np.uint64(0) if before is None else before)

    def _address(self, warp: Warp, operand: str) -> np.ndarray:
        """Of "[base]" or "[base+offset]"."""
        base, _, offset = operand.strip("[] ").partition("+")
        return self._value(warp, base.strip()).astype(np.int64) + int(offset or 0)

    def _bytes(self, instruction: Instruction, addresses: np.ndarray, nbytes: int) -> tuple[np.ndarray, np.ndarray]:
        """(the memory, places of ``nbytes`` in it for every address)."""
        shared = "shared" in instruction.operation
        memory, start = (self.shared, 0) if shared else (self.memory, GLOBAL_AT)
        assert (addresses % nbytes == 0).all(), f"not aligned: {instruction.text}"
        first = addresses - start
        assert (first >= (SHARED_AT if shared else 1)).all() and (first + nbytes <= memory.size).all(), instruction.text
        return memory, first[:, None] + np.arange(nbytes)

    def _ld(self, warp: Warp, instruction: Instruction, active: np.ndarray) -> None:
        registers = names(instruction.operands[0])
        if "param" in instruction.operation:
            value = np.full(32, self.known[instruction.operands[1].strip("[]")], np.uint64)
            return self._set(warp, registers[0], value, active)
        if not active.any():
            return None
        size = int(instruction.operation[-1][1:]) // 8
        addresses = self._address(warp, instruction.operands[1])[active]
        memory, places = self._bytes(instruction, addresses, size * len(registers))
        data = memory[places].reshape(len(addresses), len(registers), size).astype(np.uint64)
        words = (data << (np.arange(size, dtype=np.uint64) * np.uint64(8))).sum(2, dtype=np.uint64)
        for place, register in enumerate(registers):
            value = np.zeros(32, np.uint64)
            value[active] = words[:, place]
            self._set(warp, register, value, active)
        return None

    def _st(self, warp: Warp, instruction: Instruction, active: np.ndarray) -> None:
        if not active.any():
            return
        if "async" in instruction.operation:
            return self._send(warp, instruction, active)
        kind = next(part for part in reversed(instruction.operation) if re.fullmatch(r"[bu]\d+", part))
        size, registers = int(kind[1:]) // 8, names(instruction.operands[1])
        if "L2" in instruction.operation:  # a cache hint, itself 64 bits wide, comes behind the type
            size = int(re.search(r"\.b(\d+)", instruction.text)[1]) // 8
        addresses = self._address(warp, instruction.operands[0])[active]
        memory, places = self._bytes(instruction, addresses, size * len(registers))
        for place, register in enumerate(registers):
            value = self._value(warp, register)[active][:, None] >> np.arange(size, dtype=np.uint64) * np.uint64(8)
            memory[places[:, place * size : (place + 1) * size]] = (value & np.uint64(255)).astype(np.uint8)

    def _mapa(self, warp: Warp, instruction: Instruction, active: np.ndarray) -> None:
        """The address of another CTA's shared memory: its rank stands above it."""
        to, address, rank = instruction.operands
        value = (self._value(warp, rank) + np.uint64(1)) << np.uint64(PEER_SHIFT) | self._address(warp, address).astype(
            np.uint64
        )
        self._set(warp, to, value & BITS32, active)

    def _peer(self, address: int) -> tuple[Cta, int]:
        """(whose shared memory it is, the address there)."""
        rank, place = (address >> PEER_SHIFT) - 1, address & (1 << PEER_SHIFT) - 1
        assert 0 <= rank < len(self.cluster) and SHARED_AT <= place < SHARED_BYTES, hex(address)
        peer = self.cluster[rank]
        assert not all(warp.ended for warp in peer.warps), "a CTA has ended to whose memory something comes"
        return peer, place

    def _send(self, warp: Warp, instruction: Instruction, active: np.ndarray) -> None:
        """st.async: words to a peer, whose barrier hears of their bytes when they come, which is some time later."""
        registers = names(instruction.operands[1])
        to, bar = (self._address(warp, instruction.operands[place]) for place in (0, 2))
        values = np.stack([self._value(warp, register) & BITS32 for register in registers], 1).astype(np.uint32)
        for lane in np.flatnonzero(active):
            assert int(to[lane]) % values[lane].nbytes == 0, f"not aligned: {instruction.text}"
            self.sent.append((int(to[lane]), int(bar[lane]), values[lane].tobytes()))

    def deliver(self) -> None:
        """Some of what was sent, in any order."""
        self.random.shuffle(self.sent)
        for _ in range(self.random.randint(0, len(self.sent))):
            to, bar, data = self.sent.pop()
            (peer, place), (other, barrier) = self._peer(to), self._peer(bar)
            assert peer is other
            peer.shared[place : place + len(data)] = np.frombuffer(data, np.uint8)
            peer.barriers[barrier].arrive(0, -len(data))

    def _mov(self, warp: Warp, instruction: Instruction, active: np.ndarray) -> None:
        to, source = instruction.operands
        kind = instruction.operation[-1]
        if kind == "pred":
            return self._set(warp, to, (self._value(warp, source) != 0).astype(np.uint64), active)
        parts = names(to if to.startswith("{") else source)
        bits = int(kind[1:]) // len(parts)
        mask = np.uint64((1 << bits) - 1)
        if to.startswith("{"):
            for place, register in enumerate(parts):
                self._set(warp, register, self._value(warp, source) >> np.uint64(bits * place) & mask, active)
            return None
        value = np.zeros(32, np.uint64)
        for place, register in enumerate(parts):
            value |= (self._value(warp, register) & mask) << np.uint64(bits * place)
        return self._set(warp, to, value, active)

    def _createpolicy(self, warp: Warp, instruction: Instruction, active: np.ndarray) -> None:
        """What it gives is not looked at."""

    def _stmatrix(self, warp: Warp, instruction: Instruction, active: np.ndarray) -> None:
        """Matrices of eight rows of 16 bytes: lane 8 m + r has the address of row r of matrix m, lanes 4 r to 4 r + 3
        its bytes; or with trans, of its column r."""
        assert active.all(), instruction.text
        addresses = self._address(warp, instruction.operands[0])
        for matrix, register in enumerate(names(instruction.operands[1])):
            rows = typed(self._value(warp, register), "u32").view(np.uint16).reshape(8, 8)
            rows = np.ascontiguousarray(rows.T if "trans" in instruction.operation else rows).view(np.uint8)
            self.shared[addresses[8 * matrix : 8 * matrix + 8, None] + np.arange(16)] = rows

    def _ldmatrix(self, warp: Warp, instruction: Instruction, active: np.ndarray) -> None:
        """The reverse of stmatrix."""
        assert active.all(), instruction.text
        addresses = self._address(warp, instruction.operands[1])
        for matrix, register in enumerate(names(instruction.operands[0])):
            rows = self.shared[addresses[8 * matrix : 8 * matrix + 8, None] + np.arange(16)].view(np.uint16)
            rows = np.ascontiguousarray(rows.T if "trans" in instruction.operation else rows)
            self._set(warp, register, rows.reshape(-1).view(np.uint32).astype(np.uint64), active)

    def _atom(self, warp: Warp, instruction: Instruction, active: np.ndarray) -> None:
        """In global or this CTA's shared memory, lane by lane."""
        to, address, by = instruction.operands
        self._set(warp, to, self._changed(warp, instruction, address, by, active), active)

    def _red(self, warp: Warp, instruction: Instruction, active: np.ndarray) -> None:
        address, by = instruction.operands
        self._changed(warp, instruction, address, by, active)

    def _changed(self, warp: Warp, instruction: Instruction, address: str, by: str, active: np.ndarray) -> Lanes:
        """What was there before."""
        size = int(instruction.operation[-1][1:]) // 8
        change = next(CHANGES[part] for part in instruction.operation if part in CHANGES)
        before, value = np.zeros(32, np.uint64), self._value(warp, by)
        memory, start = (self.shared, 0) if "shared" in instruction.operation else (self.memory, GLOBAL_AT)
        for lane in np.flatnonzero(active):
            place = int(self._address(warp, address)[lane]) - start
            assert place % size == 0 and place >= (SHARED_AT if start == 0 else 1), instruction.text
            there = memory[place : place + size]
            before[lane] = int.from_bytes(there.tobytes(), "little")
            after = change(int(before[lane]), int(value[lane])) & (1 << 8 * size) - 1
            there[:] = np.frombuffer(after.to_bytes(size, "little"), np.uint8)
        return before

    # --- control

    def _target(self, label: str, instruction: Instruction) -> int:
        return next(
            self.program.labels[scope, label]
            for scope in reversed(instruction.scopes)
            if (scope, label) in self.program.labels
        )

    def _bra(self, warp: Warp, instruction: Instruction, active: np.ndarray) -> None:
        warp.at = np.where(active, self._target(instruction.operands[-1], instruction), warp.at)

    def _brx(self, warp: Warp, instruction: Instruction, active: np.ndarray) -> None:
        labels = self.program.branch_targets[instruction.operands[1]]
        for lane in np.flatnonzero(active):
            chosen = labels[int(self._value(warp, instruction.operands[0])[lane])]
            warp.at[lane] = self._target(chosen, instruction)

    def _ret(self, warp: Warp, instruction: Instruction, active: np.ndarray) -> None:
        warp.at = np.where(active, len(self.program.instructions), warp.at)

    # --- between lanes

    def _elect(self, warp: Warp, instruction: Instruction, active: np.ndarray) -> None:
        self._set(warp, instruction.operands[0].split("|")[1], (LANES == 0).astype(np.uint64), active)

    def _shfl(self, warp: Warp, instruction: Instruction, active: np.ndarray) -> None:
        value, by = (self._value(warp, operand) for operand in instruction.operands[1:3])
        by = by.astype(np.int64)
        source = {"bfly": LANES ^ by, "up": LANES - by, "down": LANES + by, "idx": by}[instruction.operation[2]]
        inside = (source >= 0) & (source < 32)
        to, _, whether = instruction.operands[0].partition("|")
        self._set(warp, to, value[np.where(inside, source, LANES)], active)
        if whether:
            self._set(warp, whether, inside.astype(np.uint64), active)

    def _redux(self, warp: Warp, instruction: Instruction, active: np.ndarray) -> None:
        values = typed(self._value(warp, instruction.operands[1]), instruction.operation[-1])[active].astype(np.int64)
        reduce = {"add": np.sum, "max": np.max, "min": np.min, "or": np.bitwise_or.reduce}[instruction.operation[2]]
        self._set(warp, instruction.operands[0], packed(np.full(32, reduce(values)), 32), active)

    # --- between warps

    def _bar(self, warp: Warp, instruction: Instruction, active: np.ndarray) -> None:
        """bar.sync, barrier.sync: of as many threads as it names, or all."""
        number, *threads = (int(self._value(warp, operand)[0]) for operand in instruction.operands)
        here = self.arrived.setdefault(number, [])
        here.append(warp)
        warp.waits = True
        if len(here) == (threads[0] // 32 if threads else len(self.warps)):
            for other in self.arrived.pop(number):
                other.waits = False

    def _barrier(self, warp: Warp, instruction: Instruction, active: np.ndarray) -> bool | None:
        """barrier.sync, or of all warps of a cluster barrier.cluster.arrive and barrier.cluster.wait."""
        if instruction.operation[1] != "cluster":
            return self._bar(warp, instruction, active)
        assert active.all(), instruction.text
        if instruction.operation[2] == "arrive":
            warp.meetings += 1
            return None
        if all(other.meetings >= warp.meetings for cta in self.cluster for other in cta.warps):
            return None
        warp.at -= 1  # to wait again
        return False

    def _mbarrier(self, warp: Warp, instruction: Instruction, active: np.ndarray) -> bool | None:
        what = instruction.operation[1]
        operands = instruction.operands
        if what == "try_wait":
            address, phase = (
                int(value[0]) for value in (self._address(warp, operands[1]), self._value(warp, operands[2]))
            )
            done = self.barriers[address].phase != phase & 1
            self._set(warp, operands[0], np.full(32, done, np.uint64), active)
            return done
        if active.any():
            assert active.sum() == 1, f"more than one thread: {instruction.text}"
            lane = int(np.flatnonzero(active)[0])
            number = int(self._value(warp, operands[-1])[lane])
            if what == "init":
                self.barriers[int(self._address(warp, operands[0])[lane])] = Barrier(number)
            elif what == "arrive":
                expects = "expect_tx" in instruction.operation
                barrier = self.barriers[int(self._address(warp, operands[1])[lane])]
                barrier.arrive(1 if expects else number, number if expects else 0)
            else:
                assert what == "inval", instruction.text
        return None

    # --- copies and products

    def _cp(self, warp: Warp, instruction: Instruction, active: np.ndarray) -> None:
        """cp.async.bulk.tensor: a box from global to shared memory, zeros for what is outside of the tensor."""
        if not active.any() or "prefetch" in instruction.operation:
            return
        if "bulk" not in instruction.operation:
            return self._copy_lanes(warp, instruction, active)
        lane = int(np.flatnonzero(active)[0])
        assert active.sum() == 1, instruction.text
        source = re.fullmatch(r"\[\s*(\S+?)\s*,\s*\{(.*)\}\s*\]", instruction.operands[1])
        assert source is not None, instruction.text
        tensor = self.maps[int(self._value(warp, source[1])[lane])]
        corner = [int(typed(self._value(warp, name), "s32")[lane]) for name in names(source[2])][::-1]
        assert corner[-1] * tensor.itemsize % 16 == 0, f"{instruction.text}: copies begin at multiples of 16 bytes"
        inside, address = np.ones(tensor.box, bool), np.zeros(tensor.box, np.int64)
        for axis, (first, size, stride, length) in enumerate(zip(corner, tensor.shape, tensor.strides, tensor.box)):
            at = (first + np.arange(length)).reshape([-1 if a == axis else 1 for a in range(len(tensor.box))])
            inside, address = inside & (at >= 0) & (at < size), address + at * (stride * tensor.itemsize)
        places = np.where(inside, address, 0)[..., None] + (tensor.address - GLOBAL_AT) + np.arange(tensor.itemsize)
        data = np.where(inside[..., None], self.memory[places], 0).reshape(-1)
        to = int(self._address(warp, instruction.operands[0])[lane]) + np.arange(data.size)
        if tensor.swizzle:
            assert tensor.swizzle == tensor.box[-1] * tensor.itemsize, tensor
            to = _swizzled(to, tensor.swizzle)
        self.shared[to] = data
        self.barriers[int(self._address(warp, instruction.operands[2])[lane])].arrive(0, -data.size)

    def _copy_lanes(self, warp: Warp, instruction: Instruction, active: np.ndarray) -> None:
        """cp.async: some bytes of each lane, at once, zeros behind those that are read; then no group of them is
        left to wait for."""
        if instruction.operation[2] in ("commit_group", "wait_group"):
            return
        if instruction.operation[2] == "mbarrier":  # what each lane copied is there already
            assert "noinc" in instruction.operation, instruction.text
            address = self._address(warp, instruction.operands[0])
            for lane in np.flatnonzero(active):
                self.barriers[int(address[lane])].arrive(1, 0)
            return
        to, source, nbytes, *reads = (self._address(warp, operand)[active] for operand in instruction.operands)
        for lane, (size, read) in enumerate(zip(nbytes, reads[0] if reads else nbytes)):
            first = source[lane] - GLOBAL_AT
            assert to[lane] % size == source[lane] % size == 0 <= read <= size
            assert not read or 0 < first <= self.memory.size - read, instruction.text
            data = np.zeros(size, np.uint8)
            data[:read] = self.memory[first : first + read]
            self.shared[to[lane] : to[lane] + size] = data

    def _wgmma(self, warp: Warp, instruction: Instruction, active: np.ndarray) -> None:
        """16 rows of a product of fp8 operands, 32 deep, or of bf16, 16 deep, both K-major; those of one warp of the
        four. It reads shared memory, and has sums, at once or as late as when it is waited for."""
        what = instruction.operation[1]
        if what == "commit_group":
            warp.groups.append(warp.products)
            warp.products = []
        if what == "wait_group":
            for _ in range(len(warp.groups) - int(instruction.operands[0])):
                for product in warp.groups.pop(0):
                    product()
        if what != "mma_async":
            return
        assert active.all(), instruction.text
        out, a, b, accumulate, *signs = instruction.operands
        shape = re.search(r"m64n(\d+)k(?:32|16)\.f32\.(e\dm\d|bf16)\.(e\dm\d|bf16)", instruction.text)
        assert shape is not None, instruction.text
        adds = int(self._value(warp, accumulate)[0] & BITS32) != 0
        in_registers = self._rows(warp, names(a)) if a.startswith("{") else None
        descriptors = [int(self._value(warp, one)[0]) for one in (a, b) if not one.startswith("{")]
        transposed = ["0"] * len(descriptors) if shape[2] == "bf16" else []
        assert signs == ["1", "1", *transposed], instruction.text

        def product() -> None:
            columns = _values(self._operand(descriptors[-1], int(shape[1])), shape[3])
            rows = in_registers
            if rows is None:
                rows = self._operand(descriptors[0], 64)[16 * (warp.number % 4) :][:16]
            self._give_sums(warp, names(out), names(out) if adds else [], _values(rows, shape[2]) @ columns.T)

        if warp.products or warp.groups or self.random.random() < 0.5:
            warp.products.append(product)
        else:
            product()

    def _mma(self, warp: Warp, instruction: Instruction, active: np.ndarray) -> None:
        """mma.sync: 16 rows and 8 columns of a product of bf16 operands in registers, 16 deep."""
        assert active.all() and "m16n8k16.row.col.f32.bf16.bf16.f32" in instruction.text, instruction.text
        out, a, b, before = map(names, instruction.operands)
        columns = _values(self._rows(warp, [b[0], b[0], b[1], b[1]])[:8], "bf16")
        self._give_sums(warp, out, before, _values(self._rows(warp, a), "bf16") @ columns.T)

    def _rows(self, warp: Warp, registers: list[str]) -> np.ndarray:
        """uint8 [16, 32] of an operand in registers."""
        rows = np.zeros((16, 32), np.uint8)
        for place, register in enumerate(registers):
            four = typed(self._value(warp, register), "u32").view(np.uint8).reshape(32, 4)
            row, first = LANES // 4 + 8 * (place % 2), LANES % 4 * 4 + 16 * (place // 2)
            rows[row[:, None], first[:, None] + np.arange(4)] = four
        return rows

    def _give_sums(self, warp: Warp, out: list[str], before: list[str], product: np.ndarray) -> None:
        """product [16, columns] to registers, with what ``before`` hold added where there are any."""
        values = [
            product[LANES // 4 + place // 2 % 2 * 8, place // 4 * 8 + LANES % 4 * 2 + place % 2]
            for place in range(len(out))
        ]
        sums = [value + typed(self._value(warp, register), "f32") for value, register in zip(values, before)] or values
        for register, value in zip(out, sums):
            self._set(warp, register, packed(value.astype(np.float32), 32), LANES >= 0)

    def _operand(self, descriptor: int, rows: int) -> np.ndarray:
        """uint8 [rows, 32] of a matrix descriptor: groups of eight rows of 128, 64 or 32 bytes, swizzled."""
        width, row = {1: 128, 2: 64, 3: 32}[descriptor >> 62], np.arange(rows)
        first = ((descriptor & 0x3FFF) << 4) + row // 8 * ((descriptor >> 32 & 0x3FFF) << 4) + row % 8 * width
        return self.shared[_swizzled(first[:, None] + np.arange(32), width)]


def _placed(sizes: dict[str, int]) -> dict[str, int]:
    """Where declared shared memory lies, by name; dynamic shared memory comes behind."""
    places, top = {}, SHARED_AT
    for name, nbytes in sizes.items():
        places[name] = top
        top += -(-nbytes // 16) * 16
    return places | {"global_smem": top}


def _values(rows: np.ndarray, kind: str) -> np.ndarray:
    """fp64 of bytes."""
    return from_bf16(rows.view(np.uint16)) if kind == "bf16" else FP8[kind][rows]


def _swizzled(address: np.ndarray, width: int = 128) -> np.ndarray:
    """Of the swizzle of so many bytes: their 16-byte units change places by the number of a line of 128."""
    return address ^ (address >> 7 & width // 16 - 1) << 4
