"""Tiny models, and checkpoints of them in the forms in which they are published."""

import functools
import tempfile
from pathlib import Path

from sparse_attn.checkpoints.published import write_published
from sparse_attn.spec import tiny_glm5, tiny_v4, tiny_v32

SPECS = {"v32": tiny_v32(), "glm": tiny_glm5(), "v4": tiny_v4()}
FORMS = ("published", "flash-base", "fp8-e8m0", "fused", "bf16")
CASES = [(name, form) for name in SPECS for form in FORMS if name == "v4" or form != "flash-base"]
HOME = tempfile.TemporaryDirectory()


@functools.cache
def written(name, form):
    """The folder of a checkpoint, written once. No test changes what lies in it."""
    folder = Path(HOME.name) / f"{name}-{form}"
    write_published(folder, SPECS[name], form, seed=3)
    return folder
