"""DSA models of transformers, with scores, selection and attention by this library.

``register()`` adds the attention implementation ``"sparse_attn"``. A model that is loaded with
``attn_implementation="sparse_attn"``, or switched by ``model.set_attn_implementation("sparse_attn")``, runs on it.
Every other model runs as before. The package transformers is an extra; importing this module does not import it.

Of equal index scores the lowest keys are selected. transformers takes any, so where relu leaves zeros at the border of
the top-k, as in small random models, logits differ until its ``torch.Tensor.topk`` is replaced by a stable one.
"""

from __future__ import annotations

from typing import Any

from sparse_attn.integrations.transformers.families import NAME, register, unregister
from sparse_attn.integrations.transformers.replay import record_indices, replay_indices

__all__ = ["NAME", "record_indices", "register", "replay_indices", "static_cache", "unregister"]


def static_cache(model: Any, max_len: int) -> Any:
    """A cache of fixed size, for compiled and captured steps of ``model``.

    model: a model of transformers, or its config. max_len: tokens of the longest sequence, padding included, at least
    1. Returns transformers' StaticCache for families over MLA. For deepseek_v4, for which transformers has none, it
    is a Cache of the bridge's own: a layer holds a window of raw keys and ``max_len / ratio`` entries. Memory is taken
    by the first step, for its batch; that step is not compiled. Raises ValueError for models the bridge does not run.
    """
    from sparse_attn.integrations.transformers import static

    return static.static_cache(model, max_len)
