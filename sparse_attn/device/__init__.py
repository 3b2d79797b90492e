"""What kernels share, and Triton's interpreter as they need it."""

from sparse_attn.target import interpreting

if interpreting():
    from sparse_attn.device.triton_private import mend_interpreter

    mend_interpreter()
