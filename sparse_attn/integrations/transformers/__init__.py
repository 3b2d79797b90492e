"""DSA models of transformers, with scores, selection and attention by this library.

``register()`` adds the attention implementation ``"sparse_attn"``. A model that is loaded with
``attn_implementation="sparse_attn"``, or switched by ``model.set_attn_implementation("sparse_attn")``, runs on it.
Every other model runs as before. The package transformers is an extra; importing this module does not import it.
"""

from __future__ import annotations

from sparse_attn.integrations.transformers.families import NAME, register, unregister

__all__ = ["NAME", "register", "unregister"]
