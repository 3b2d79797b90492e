"""Schema of the rotation."""

from sparse_attn.framework.registration import define_op
from sparse_attn.ops.layers.rope import debug, fake, reference


def launchers():
    from sparse_attn.ops.layers.rope import launch

    return launch


apply_rope = define_op(
    "apply_rope",
    "(Tensor x, Tensor positions, Tensor cos_sin, int start, bool interleaved, bool inverse, str impl) -> Tensor",
    fake=fake.apply_rope,
    reference=reference.apply_rope,
    rules=debug.apply_rope,
    launch=lambda: launchers().apply_rope,
)
