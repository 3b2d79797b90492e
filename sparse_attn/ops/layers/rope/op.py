"""Schema of the rotation."""

from sparse_attn.framework.registration import define_op
from sparse_attn.ops.layers.rope import fake

apply_rope = define_op(
    __package__,
    "apply_rope",
    "(Tensor x, Tensor positions, Tensor cos_sin, int start, bool interleaved, bool inverse, str impl) -> Tensor",
    fake.apply_rope,
)
