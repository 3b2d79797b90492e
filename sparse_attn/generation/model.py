"""A forward with its fixed arguments, as an nn.Module: weights are its parameters."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

from sparse_attn.framework.torch_private import parameters
from sparse_attn.mesh import ONE_RANK, Mesh
from sparse_attn.models import deepseek_v4, deepseek_v32, mtp
from sparse_attn.models.params import hold, keeps_dtype
from sparse_attn.models.shapes import prediction_spec
from sparse_attn.pipeline import LOGITS_BYTES, CacheLayouts
from sparse_attn.pipeline.options import Options
from sparse_attn.spec import CompressedSpec, Spec
from sparse_attn.types import Caches, StepPlan, WindowCaches
from sparse_attn.weight_layout import PackedWeight, Weight

AnyCaches = Caches | WindowCaches
DRAFTERS = "allowed: a function, or None with a Model of such weights; see load(mtp=True)"
SCALE = "_scale"  # behind the name of a packed weight: of its scales


class Weights(torch.nn.Module):
    """A node in the tree of a model's weights."""


class Model(torch.nn.Module):
    """A forward's fixed arguments.

    Every weight is a parameter under its own name ("layers.0.attn.q_a"), rope tables included, so that state_dict()
    holds what ``params`` does, and load_state_dict() takes it. A PackedWeight is two: its codes under its own name, and
    its scales under that with "_scale" behind. ``to`` moves all of them; a new dtype reaches those that models.params
    holds in the model's dtype, and no packed weight. Dynamo takes the numbers among a module's attributes for
    constants.

    Args:
        spec: the whole model's.
        params: what checkpoints.load or models.params give, all on one device.
        layouts: of the caches.
        impl: "auto", "reference" or "triton".
        logits_bytes: bound on the index scores held at a time.
        batch_invariant: of every step: a row's bits depend on no other row.
        prefill_activations: "fp8" quantises what steps with prefill rows multiply by packed weights; see
            models.deepseek_v32.forward.
        mesh: the ranks that this process is one of; ``params`` are its share (checkpoints.sharding).

    Raises:
        TypeError: wrong types.
        ValueError: quantised rows where no weight is packed; options out of range.
    """

    embed: torch.nn.Parameter  # which every model has

    def __init__(
        self,
        spec: Spec | CompressedSpec,
        params: Mapping[str, Weight],
        layouts: CacheLayouts,
        impl: str = "auto",
        logits_bytes: int = LOGITS_BYTES,
        *,
        batch_invariant: bool = False,
        prefill_activations: str = "exact",
        mesh: Mesh = ONE_RANK,
    ):
        super().__init__()
        self.spec, self.layouts = spec, layouts
        options = Options(impl, logits_bytes, batch_invariant, prefill_activations)
        self.impl, self.logits_bytes, self.batch_invariant = options.impl, options.logits_bytes, options.batch_invariant
        self.prefill_activations, self.mesh = options.activations, mesh
        self._places = []  # (name, its node, its name there), because a walk over the tree takes long
        self._predictors: list[Predictor] = []  # once it is asked for; a list, because it is no part of the model
        self._predicts = any(name.startswith(mtp.PREFIX) for name in params)
        self._packed = {name: value.layout for name, value in params.items() if isinstance(value, PackedWeight)}
        if prefill_activations != "exact" and not self._packed:
            raise ValueError(
                f"prefill_activations: got {prefill_activations!r} and no packed weight, allowed: 'exact', or weights "
                "as they are published, see load"
            )
        for name, value in params.items():
            if isinstance(value, PackedWeight):
                self._register(name, value.codes)
                self._register(name + SCALE, value.scales)
            else:
                self._register(name, value)
        self.register_load_state_dict_pre_hook(_check_packed)
        self._count_alone()

    def _register(self, name: str, value: torch.Tensor) -> None:
        *path, leaf = name.split(".")
        node: torch.nn.Module = self
        for part in path:
            if not hasattr(node, part):
                node.add_module(part, Weights())
            node = getattr(node, part)
        node.register_parameter(leaf, hold(value))
        self._places.append((name, node, leaf))

    @property
    def params(self) -> Mapping[str, Weight]:
        """The weights by name, as the forwards take them; read-only."""
        return types.MappingProxyType(self._weights())

    @property
    def device(self) -> torch.device:
        return self.embed.device

    @property
    def options(self) -> Options:
        """What every step is asked for."""
        return Options(self.impl, self.logits_bytes, self.batch_invariant, self.prefill_activations)

    @property
    def has_rings(self) -> bool:
        """Whether requests own rings beside blocks: window keys and compressor state."""
        return isinstance(self.spec, CompressedSpec)

    @property
    def packs_experts(self) -> bool:
        """Whether routed experts are packed."""
        return any(name.endswith(".moe.gate_up") for name in self._packed)

    def invariant(self) -> Model:
        """The model with batch_invariant, of the same weights; itself where it is."""
        if self.batch_invariant:
            return self
        return Model(
            self.spec, self.params, self.layouts, self.impl, self.logits_bytes, batch_invariant=True,
            prefill_activations=self.prefill_activations, mesh=self.mesh,
        )  # fmt: skip

    @property
    def predicts(self) -> bool:
        """Whether the weights hold a layer of multi-token prediction."""
        return self._predicts

    def predictor(self) -> Predictor:
        """The layer of multi-token prediction, the same at every call.

        Returns:
            A Predictor.

        Raises:
            ValueError: the weights hold none.
        """
        if not self._predictors:
            self._predictors.append(Predictor(self))
        return self._predictors[0]

    def allocate_caches(
        self, num_blocks: int, block_size: int, *, requests: int, step_rows: int, next_n: int = 1,
        rings_together: bool = False,
    ) -> AnyCaches:  # fmt: skip
        """Zeroed caches, those of a layer of multi-token prediction behind the others.

        Args:
            num_blocks: of the paged caches.
            block_size: tokens a block of them covers.
            requests: see models.deepseek_v4.allocate_caches; ignored for a model without rings, as are the next two and
                rings_together.
            step_rows: rows of a step, at most.
            next_n: rows of a decode request.
            rings_together: see models.deepseek_v4.allocate_caches.

        Returns:
            Caches, or WindowCaches.

        Raises:
            TypeError, ValueError: what allocate_cache refuses.
        """
        specs = [self.spec, prediction_spec(self.spec)] if self.predicts else [self.spec]
        kinds = []
        for spec in specs:
            if isinstance(spec, CompressedSpec):
                kinds.append(
                    deepseek_v4.allocate_caches(
                        spec, self.layouts, num_blocks, block_size, self.device,
                        requests=requests, step_rows=step_rows, next_n=next_n, rings_together=rings_together,
                    )
                )  # fmt: skip
            else:
                kinds.append(deepseek_v32.allocate_caches(spec, self.layouts, num_blocks, block_size, self.device))
        joined: Any = type(kinds[0])
        return joined(*(sum(parts, ()) for parts in zip(*kinds)))

    def forward(self, tokens: torch.Tensor, caches: AnyCaches, plan: StepPlan, keep_hidden: bool = False) -> Any:
        """fp32 logits [T, vocab]; see models.deepseek_v32.forward and models.deepseek_v4.forward.

        Args:
            tokens: int64 [T], ids.
            caches: with or without those of multi-token prediction; written in place.
            plan: of the step.
            keep_hidden: give (logits, what models.mtp.predict takes).

        Returns:
            fp32 [T, vocab].

        Raises:
            TypeError, ValueError: what the forwards refuse.
        """
        run: Callable[..., Any] = deepseek_v4.run if self.has_rings else deepseek_v32.run
        layers = self.spec.num_layers
        if self.predicts and len(caches.kv) > layers:
            kind: Any = type(caches)
            caches = kind(*(held[:layers] for held in caches))
        inputs = self._weights(), self.spec, tokens, caches, plan
        return run(*inputs, self.layouts, self.options, mesh=self.mesh, keep_hidden=keep_hidden)

    def _weights(self) -> dict[str, Weight]:
        held = self._tensors()
        packed: dict[str, Weight] = {
            name: PackedWeight(held.pop(name), held.pop(name + SCALE), layout) for name, layout in self._packed.items()
        }
        return held | packed

    def _tensors(self) -> dict[str, torch.nn.Parameter]:
        if torch.compiler.is_exporting():  # which knows a weight by the way to it
            return dict(self.named_parameters(remove_duplicate=False))
        return {name: parameters(node)[leaf] for name, node, leaf in self._places}

    def _apply(self, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Model:
        packed = {part for name in self._packed for part in (name, name + SCALE)}
        fixed = {id(value) for name, value in self._tensors().items() if name in packed or keeps_dtype(name)}

        def moved(value: torch.Tensor) -> torch.Tensor:
            if id(value) not in fixed:
                return fn(value)
            tried = fn(value.new_empty(0, dtype=value.dtype, device=value.device))  # a copy of all could be too large
            return fn(value) if tried.dtype == value.dtype else value.to(tried.device)

        return super()._apply(moved, recurse)

    def _count_alone(self) -> None:
        self.forward = _alone(self)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name not in ("forward", "_predictors")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state | {"_predictors": []})
        self._count_alone()


class Predictor(torch.nn.Module):
    """The layer of multi-token prediction of ``model``, which holds its weights; see models.mtp. ValueError for a model
    without one."""

    def __init__(self, model: Model):
        super().__init__()
        if not model.predicts:
            raise ValueError(f"drafter: got None and a model without multi-token prediction, {DRAFTERS}")
        self.model, self.spec = model, prediction_spec(model.spec)
        self.forward = _alone(self)

    def forward(self, tokens: torch.Tensor, hidden: torch.Tensor, caches: AnyCaches, plan: StepPlan) -> torch.Tensor:
        """As models.mtp.predict, with the caches of all layers."""
        model, layers = self.model, self.model.spec.num_layers
        kind: Any = type(caches)
        inputs = model._weights(), self.spec, tokens, hidden, kind(*(held[layers:] for held in caches)), plan
        return mtp.predict(*inputs, model.layouts, model.options, mesh=model.mesh)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """fp32 [T, vocab] of what the forward gives."""
        model = self.model
        return mtp.predicted_logits(model._weights(), self.spec, hidden, model.options, mesh=model.mesh)


def _alone(module: torch.nn.Module) -> types.MethodType:
    """The module's forward with a code object of its own: Dynamo counts compilations per code object, and would refuse
    the next model once it had compiled a few."""
    shared = type(module).forward
    own = types.FunctionType(
        shared.__code__.replace(), shared.__globals__, shared.__name__, shared.__defaults__, shared.__closure__
    )
    own.__kwdefaults__, own.__annotations__, own.__doc__ = shared.__kwdefaults__, shared.__annotations__, shared.__doc__
    return types.MethodType(own, module)


def _check_packed(model: torch.nn.Module, state: Mapping[str, torch.Tensor], prefix: str, *_: object) -> None:
    """TypeError where codes or scales would be copied from a tensor of another dtype, as numbers."""
    assert isinstance(model, Model)
    held = model._tensors()
    for name in model._packed:
        for part in (name, name + SCALE):
            given = state.get(prefix + part)
            if given is not None and given.dtype != held[part].dtype:
                raise TypeError(f"state {prefix + part}: got {given.dtype}, allowed: {held[part].dtype}")
