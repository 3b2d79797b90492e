"""How a step is computed, as one value for everything that it calls. Public functions and Model make it of their
keywords."""

from __future__ import annotations

from dataclasses import dataclass, replace

from sparse_attn.framework import checks
from sparse_attn.ops.layers.products import ACTIVATIONS
from sparse_attn.ops.topk.fused import LOGITS_BYTES


@dataclass(frozen=True)
class Options:
    """impl: as every operator takes it, which checks it. logits_bytes: bound on the index scores held at a time.
    batch_invariant: of attention (pipeline.attend) and of every product (ops.layers.products). activations: what a
    product makes of the rows it multiplies by packed weights, "exact" or "fp8"; of a Model, its prefill_activations,
    for steps with prefill rows (models.step).
    """

    impl: str = "auto"
    logits_bytes: int = LOGITS_BYTES
    batch_invariant: bool = False
    activations: str = "exact"

    def __post_init__(self):
        if type(self.logits_bytes) is not int or self.logits_bytes < 0:  # asked here first: every layer makes one
            checks.check_at_least("logits_bytes", self.logits_bytes, 0)
        if type(self.batch_invariant) is not bool:
            checks.check_flag("batch_invariant", self.batch_invariant)
        if self.activations not in ACTIVATIONS:
            checks.check_choice("prefill_activations", self.activations, ACTIVATIONS)

    def exact(self) -> Options:
        return self if self.activations == "exact" else replace(self, activations="exact")
