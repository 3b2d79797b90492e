"""A test under another default dtype and device than torch's own, for the package alone: what is called from anywhere
else (the test, transformers) finds fp32 and the CPU."""

import contextlib
import inspect
import sys
import zlib
from pathlib import Path

import torch
from torch.overrides import TorchFunctionMode

PACKAGE = str(Path(__file__).parent.parent.parent / "sparse_attn")
TORCH = str(Path(torch.__file__).parent)
DTYPES = (torch.bfloat16, torch.float16, torch.float64)
FACTORIES = {getattr(torch, name) for name in (
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "ones", "rand",
    "randint", "randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
)}  # fmt: skip
FILES = """
    attention attention_split_kv attention_two_caches compressed_plan compressor debug differences errors generate
    hyper_connection index_cache index_logits index_query index_topk kv_cache kv_cache_planar layout loading
    loading_v4 models models_fp8 models_v4 paging pipeline plan_cache properties quality ragged ragged_windows rope
    router router_scores sampling saving step_plan topk topk_grouped topk_slots""".split()


def suits(item, every: int) -> bool:
    """Whether a test runs under other defaults too: one in ``every`` of FILES. Not those that compile: Dynamo does not
    trace what tells callers apart."""
    compiles = any(word in inspect.getsource(item.function) for word in ("compile", "capture", "export"))
    return item.path.stem.removeprefix("test_") in FILES and not compiles and _number(item.nodeid) % every == 0


def _number(name: str) -> int:
    return zlib.crc32(name.encode())


class OthersAsUsual(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if _called_from_the_package():
            return func(*args, **kwargs)
        other = torch.get_default_dtype()
        torch.set_default_dtype(torch.float32)
        try:
            if func in FACTORIES and kwargs.get("device") is None:
                kwargs["device"] = "cpu"
            return func(*args, **kwargs)
        finally:
            torch.set_default_dtype(other)


def _called_from_the_package() -> bool:
    frame = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(TORCH):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename.startswith(PACKAGE)


@contextlib.contextmanager
def other_defaults(name: str):
    """Tensors that the package makes without a device have no memory ("meta"), whatever reads them fails. ``name``
    chooses the dtype."""
    torch.set_default_dtype(DTYPES[_number(name) // 64 % len(DTYPES)])
    try:
        with torch.device("meta"), OthersAsUsual():
            yield
    finally:
        torch.set_default_dtype(torch.float32)
