"""Several processes with gloo, each a rank of a mesh, and what they generate beside one process."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import torch.multiprocessing as multiprocessing
from support.compilations import Graphs, compiled_by

from sparse_attn import Batching, Model, generate
from sparse_attn.checkpoints.load import load
from sparse_attn.checkpoints.sharding import shard, shard_params
from sparse_attn.cli.shipped import shipped_models
from sparse_attn.generation.generate import Generation
from sparse_attn.generation.processes import check_same, check_same_weights, make_mesh
from sparse_attn.mesh import ONE_RANK, Mesh, planned_mesh
from sparse_attn.models.params import random_params
from sparse_attn.pipeline import cache_layouts
from sparse_attn.spec import preset

LENGTHS = (70, 3, 41)  # more than a prefill step, fewer than there are ranks
NEW_TOKENS = 5


class Grid(NamedTuple):
    tensor: int = 1
    context: int = 1
    expert: int = 1
    data: int = 1

    @property
    def size(self) -> int:
        return self.tensor * self.context * self.data

    def __str__(self) -> str:
        return f"T{self.tensor}C{self.context}E{self.expert}D{self.data}"


class Case(NamedTuple):
    name: str
    grid: Grid
    cache: str = "fp32"
    lengths: tuple[int, ...] = LENGTHS
    block_size: int | None = None
    speculate: int = 0  # drafts of the layer of multi-token prediction
    compile: bool = False  # by Dynamo, whose graphs run as they are

    def __str__(self) -> str:
        return f"{self.name} {self.grid} {self.cache}"

    def file(self, folder: Path) -> Path:
        """Where what one process generates is kept."""
        return folder / f"{self.name}-{self.cache}-{len(self.lengths)}-{max(self.lengths)}-{self.speculate}.pt"


def run_processes(size: int, body: Callable[..., None], folder: Path, *arguments: object) -> None:
    """Run ``body(rank, *arguments)`` in ``size`` processes of one group; an assertion that fails in one fails here."""
    running = multiprocessing.start_processes(
        _run_rank, args=(size, str(folder / "store"), body, arguments), nprocs=size, start_method="spawn", join=False
    )
    try:
        for _ in range(40):
            if running.join(timeout=6):
                return
        pytest.fail("the processes have not ended after four minutes")
    finally:
        for process in running.processes:
            process.kill()


def _run_rank(rank: int, size: int, store: str, body: Callable[..., None], arguments: tuple) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=size, timeout=datetime.timedelta(seconds=60)
    )
    body(rank, *arguments)
    dist.barrier()
    dist.destroy_process_group()


def mesh_of_grid(grid: Grid) -> Mesh:
    return make_mesh(tensor=grid.tensor, context=grid.context, data=grid.data, expert=grid.expert, device="cpu")


def model_of(case: Case, mesh: Mesh = ONE_RANK) -> Model:
    """Random fp32 weights of ``case``; a process draws all of them and keeps its own. Those of a model that ships here:
    from its files, of which a process reads its own."""
    if case.name in shipped_models():
        spec, params = load(shipped_models()[case.name], dtype=torch.float32, expand=True, mesh=mesh)
        return Model(spec, params, cache_layouts(spec, case.cache), "reference", mesh=mesh)
    spec = preset(case.name)
    params = shard_params(random_params(spec, seed=0, mtp=bool(case.speculate)), mesh)
    return Model(spec, params, cache_layouts(spec, case.cache), "reference", mesh=mesh)


def prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(0, 256, (length,), generator=generator).tolist() for length in lengths]


def generated(case: Case, mesh: Mesh = ONE_RANK) -> Generation:
    if case.compile and mesh != ONE_RANK:
        torch.compile = compiled_by(Graphs())
    return generate(
        model_of(case, mesh), prompts(case.lengths), max_new_tokens=NEW_TOKENS, prefill_tokens=32, keep_logits=True,
        compile=case.compile and mesh != ONE_RANK, block_size=case.block_size, speculate=case.speculate,
    )  # fmt: skip


def served(case: Case, mesh: Mesh, model: Model | None = None) -> list[tuple[int, list[int], list[float] | None]]:
    """(number, tokens, their log-probabilities) of every prompt of this process's data rank, by a scheduler."""
    own = list(enumerate(prompts(case.lengths)))[mesh.data.rank :: mesh.data.size]
    batching = Batching(
        model or model_of(case, mesh), rows=2, num_blocks=64, max_context=max(case.lengths) + NEW_TOKENS, prefill_tokens=32,
        block_size=case.block_size, speculate=case.speculate, logprobs=not case.speculate,
    )  # fmt: skip
    numbers = {batching.submit(prompt, max_new_tokens=NEW_TOKENS): number for number, prompt in own}
    return [(numbers[one.request], one.tokens, one.logprobs) for one in batching.drain()]


def write_alone(cases: list[Case], folder: Path) -> None:
    """What one process generates in every case."""
    for case in cases:
        path = case.file(folder)
        if not path.exists():
            found = generated(case)
            torch.save((found.tokens, found.logits), path)


def compare_with_one(rank: int, cases: list[Case], folder: Path) -> None:
    """Tokens equal one process's, and logits are within 1e-4 of them; not where a last bit decides what a cache's codes
    round to."""
    for case in cases:
        mesh = mesh_of_grid(case.grid)
        tokens, logits = torch.load(case.file(folder))
        if mesh.data.size > 1:
            for number, own, scores in served(case, mesh):
                assert own == tokens[number], f"{case} rank {rank}: got {own}, one process {tokens[number]}"
                if scores is not None and case.cache == "fp32":
                    at = torch.tensor(own).unsqueeze(1)
                    alone = logits[number][-len(own) :].log_softmax(1).gather(1, at)[:, 0]
                    torch.testing.assert_close(torch.tensor(scores), alone, rtol=0, atol=1e-4)
            continue
        found = generated(case, mesh)
        assert found.tokens == tokens, f"{case} rank {rank}: got {found.tokens}, one process {tokens}"
        assert found.logits is not None
        if case.cache != "fp32":
            continue
        for own, alone in zip(found.logits, logits, strict=True):
            torch.testing.assert_close(own, alone, rtol=0, atol=1e-4, msg=lambda text: f"{case} rank {rank}: {text}")


def compare_and_disagree(rank: int, cases: list[Case], folder: Path) -> None:
    """As compare_with_one; then ranks that were given different values say so, all of them alike."""
    compare_with_one(rank, cases, folder)
    mesh, device = mesh_of_grid(cases[0].grid), torch.device("cpu")
    check_same(mesh, device, seeds=[1, 2], prompts=[[3]])
    with pytest.raises(ValueError, match="seeds: got another value on rank 1 than on rank 0, allowed: the same on all"):
        check_same(mesh, device, prompts=[[3]], seeds=[1, rank])
    disagree_on_weights(rank, cases)


def disagree_on_weights(rank: int, cases: list[Case]) -> None:
    """The last process has one weight otherwise. All say so if another process holds the same part of it."""
    for case in cases:
        mesh, last = mesh_of_grid(case.grid), case.grid.size - 1
        whole = random_params(preset(case.name), seed=0)
        for name in ("embed", "layers.1.attn.q_a", "layers.1.attn.o", "layers.1.attn.o_b", "layers.1.moe.down"):
            if name not in whole:
                continue
            places = [planned_mesh(**case.grid._asdict(), place=place) for place in range(last + 1)]
            *others, its = (shard(name, whole[name], place) for place in places)
            model = model_of(case, mesh)
            check_same_weights(mesh, model.device, model.params, sharing=True)
            if rank == last:
                model.state_dict()[name].add_(1)
            told = any(torch.equal(its, other) for other in others)
            with (
                pytest.raises(ValueError, match=f"^weight {name}: got another value on rank {last} than on rank ")
                if (told)
                else contextlib.nullcontext()
            ):
                if mesh.expert_replicas > 1:
                    served(case, mesh, model)
                else:
                    generate(model, [[1, 2, 3]], max_new_tokens=1, block_size=case.block_size)
