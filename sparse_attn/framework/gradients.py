"""No operator has a backward: where a gradient is wanted its forward runs, and a backward that reaches it raises.

The refusal is an operator of its own that outputs pass through, only in grad mode and where an input requires grad.
Otherwise it costs nothing. Compiled code traces a backward before any is asked for; it raises when that backward runs.
"""

from __future__ import annotations

import warnings

import torch

from sparse_attn.framework.torch_private import OpOverload

NO_BACKWARD, REFUSE = "sparse_attn::no_backward", "sparse_attn::refuse_backward"


def end(output: torch.Tensor, name: str, *inputs: torch.Tensor) -> torch.Tensor:
    """``output``, which depends on ``inputs`` through operator ``name`` in a way that autograd does not see. A backward
    from it to any of them raises."""
    followed = [value for value in inputs if value.requires_grad]
    return torch.ops.sparse_attn.no_backward(output, followed, name) if torch.is_grad_enabled() and followed else output


def call(overload: OpOverload, name: str, args: tuple):
    """The outputs of operator ``name`` for ``args``, of which autograd would follow some; each ends their gradients."""
    inputs = [value for value in args if isinstance(value, torch.Tensor) and value.requires_grad]
    outputs = overload(*[value.detach() if isinstance(value, torch.Tensor) else value for value in args])
    if outputs is None:
        if not torch.compiler.is_compiling():
            warnings.warn(f"{name} writes values that require grad: nothing that reads them passes a gradient on",
                          stacklevel=4)  # fmt: skip
        return None
    single = isinstance(outputs, torch.Tensor)
    ended = [
        torch.ops.sparse_attn.no_backward(output, inputs, name) if output.is_floating_point() else output
        for output in ((outputs,) if single else outputs)
    ]
    return ended[0] if single else tuple(ended)


def _setup(ctx, inputs, output) -> None:
    _, followed, ctx.name = inputs
    ctx.save_for_backward(*followed)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad: torch.Tensor | None):
    """Every refusal takes the gradient that arrives. A compiler would run a refusal that does not depend on it with the
    forward."""
    refused = torch.ops.sparse_attn.refuse_backward
    if grad is None:
        return None, [None] * len(ctx.saved_tensors), None
    return refused(grad, grad, ctx.name), [refused(grad, value, ctx.name) for value in ctx.saved_tensors], None


def _raise(grad: torch.Tensor, like: torch.Tensor, name: str) -> torch.Tensor:
    raise NotImplementedError(f"{name} has no backward: run it under torch.no_grad(), or detach what it is given")


TAGS = (torch.Tag.pt2_compliant_tag,)
torch.library.define(NO_BACKWARD, "(Tensor output, Tensor[] inputs, str name) -> Tensor", tags=TAGS)
torch.library.impl(NO_BACKWARD, ("cpu", "cuda"))(lambda output, inputs, name: output.clone())
torch.library.register_fake(NO_BACKWARD)(lambda output, inputs, name: torch.empty_like(output))
torch.library.register_autograd(NO_BACKWARD, _backward, setup_context=_setup)
torch.library.define(REFUSE, "(Tensor grad, Tensor like, str name) -> Tensor", tags=TAGS)
torch.library.impl(REFUSE, ("cpu", "cuda"))(_raise)
torch.library.register_fake(REFUSE)(lambda grad, like, name: torch.empty_like(like))
