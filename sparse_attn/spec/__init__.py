"""Model facts as frozen dataclasses: what a forward needs to know.

Nothing below the models reads a model's name; a spec's ``name`` is for messages.
"""

from sparse_attn.framework.checks import check_text
from sparse_attn.spec.compressed import CompressedSpec, deepseek_v4_flash, deepseek_v4_pro, tiny_v4
from sparse_attn.spec.hf import from_hf_config
from sparse_attn.spec.latent import (
    Spec,
    deepseek_v32,
    glm5,
    leading_dense,
    shared_index_layers,
    tiny_glm5,
    tiny_v32,
)
from sparse_attn.spec.parts import IndexSpec, MoeSpec, YarnSpec, softmax_scale
from sparse_attn.spec.to_hf import to_hf_config

PRESETS = {
    "deepseek_v32": deepseek_v32, "glm5": glm5, "deepseek_v4_flash": deepseek_v4_flash,
    "deepseek_v4_pro": deepseek_v4_pro, "tiny_v32": tiny_v32, "tiny_glm5": tiny_glm5, "tiny_v4": tiny_v4,
}  # fmt: skip


def preset(name: str) -> Spec | CompressedSpec:
    """The preset called ``name``, of which letters and digits count: "DeepSeek-V3.2" is deepseek_v32.

    Args:
        name: a key of spec.PRESETS, such as "deepseek_v32".

    Returns:
        Its spec.

    Raises:
        TypeError: no str.
        ValueError: another name.
    """
    check_text("preset", name)
    for known, made in PRESETS.items():
        if _plain(known) == _plain(name):
            return made()
    raise ValueError(f"preset: got {name!r}, allowed: {', '.join(PRESETS)}")


def _plain(name: str) -> str:
    return name.lower().translate(dict.fromkeys(map(ord, "-_.")))


__all__ = [
    "PRESETS", "CompressedSpec", "IndexSpec", "MoeSpec", "Spec", "YarnSpec", "deepseek_v32", "deepseek_v4_flash",
    "deepseek_v4_pro", "from_hf_config", "glm5", "leading_dense", "preset", "shared_index_layers", "softmax_scale",
    "tiny_glm5", "tiny_v32", "tiny_v4", "to_hf_config",
]  # fmt: skip
