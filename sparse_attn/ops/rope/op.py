"""Schema of the rotation."""

from sparse_attn.ops.rope import fake
from sparse_attn.registration import define_op

apply_rope = define_op(
    __package__,
    "apply_rope",
    "(Tensor x, Tensor positions, Tensor cos_sin, int start, bool interleaved, bool inverse, str impl) -> Tensor",
    fake.apply_rope,
)
