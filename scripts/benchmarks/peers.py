"""The kernels ours are measured beside: FlashMLA, DeepGEMM and vLLM's top-k, out of an unpacked vLLM 0.25 wheel.

PEERS_DIR names the folder that holds vllm/ (_flashmla_C, _C_stable_libtorch, third_party/flashmla,
third_party/deep_gemm in it) and triton_peers/sparse_utils.py. _C_stable_libtorch, vLLM's top-k, may be of 0.33. No
other part of vLLM is imported. DeepGEMM compiles with nvcc (CUDA_HOME).
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import importlib.util
import os
import subprocess
import sys
import types
from pathlib import Path
from types import ModuleType

import torch

VARIABLE = "PEERS_DIR"
D_V = 512
HEADS = 64  # FlashMLA takes no fewer
COOPERATIVE_ROWS = 32  # cooperative_topk takes no more; vLLM changes to persistent_topk there
TOP_K_SCRATCH = 1 << 20
# Each names a few of DeepGEMM's kernels (see _compile); they are independent, so they compile side by side.
KERNELS = ("scores", "paged 1", "paged 2", "plan 64", "plan 128")


class Peers:
    """One method per kernel, in this library's terms. Nothing is loaded before it is first called."""

    def __init__(self, root: Path):
        self.root = root

    def sparse_prefill(
        self,
        q: torch.Tensor,  # bf16 [tokens, 64 or 128, 576 or 512]
        kv: torch.Tensor,  # bf16 [rows, d_qk]
        indices: torch.Tensor,  # int32 [tokens, top_k]
        scale: float,
        sink: torch.Tensor | None = None,
        lengths: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(out [tokens, heads, 512], natural-log lse [tokens, heads])."""
        out, _, lse = self._flash_mla.flash_mla_sparse_fwd(
            q, kv.unsqueeze(1), indices.unsqueeze(1), scale, D_V, attn_sink=sink, topk_length=lengths
        )
        return out, lse

    def decode_plan(self) -> object:
        """What the first ``decode`` with it fills and later ones of the same shapes reuse."""
        return self._flash_mla.get_mla_metadata()[0]

    def decode(
        self,
        q: torch.Tensor,  # bf16 [requests, s_q, 64 or 128, 576 or 512]
        cache: torch.Tensor,  # uint8 [blocks, block_size, 656 or 584]
        indices: torch.Tensor,  # int32 [requests, s_q, top_k]
        plan: object,
        scale: float,
        sink: torch.Tensor | None = None,
        extra_cache: torch.Tensor | None = None,  # uint8 [blocks, block_size, 584]
        extra_indices: torch.Tensor | None = None,  # int32 [requests, s_q, extra top_k]
    ) -> torch.Tensor:
        """out [requests * s_q, heads, 512]; with two caches also given each list's length, as vLLM does."""
        lengths, extra = (None, None), None
        if extra_cache is not None:
            extra = extra_cache.unsqueeze(2)
            lengths = tuple(self._lengths(q.shape[0], rows.shape[2]) for rows in (indices, extra_indices))
        out, _ = self._flash_mla.flash_mla_with_kvcache(
            q, cache.unsqueeze(2), None, None, D_V, plan, softmax_scale=scale, is_fp8_kvcache=True, indices=indices,
            attn_sink=sink, extra_k_cache=extra, extra_indices_in_kvcache=extra_indices, topk_length=lengths[0],
            extra_topk_length=lengths[1],
        )  # fmt: skip
        return out.flatten(0, 1)

    @staticmethod
    @functools.cache
    def _lengths(requests: int, length: int) -> torch.Tensor:
        return torch.full((requests,), length, dtype=torch.int32, device="cuda")

    def scores(self, q, k, k_scale, weights, kv_start, kv_end) -> torch.Tensor:
        """fp32 [rows, keys] of float8 q and k; what lies outside a row's range is undefined."""
        score = self._deep_gemm.fp8_fp4_mqa_logits
        return score((q, None), (k, k_scale), weights, kv_start, kv_end, clean_logits=False)

    def paged_plan(self, context_lens: torch.Tensor, block_size: int) -> torch.Tensor:
        gemm = self._deep_gemm
        return gemm.get_paged_mqa_logits_metadata(context_lens, block_size, gemm.get_num_sms())

    def paged_scores(self, q, cache, weights, context_lens, block_table, plan, max_context_len: int) -> torch.Tensor:
        """fp32 [requests * next_n, max_context_len]; what lies behind a row's length is undefined."""
        return self._deep_gemm.fp8_fp4_paged_mqa_logits(
            (q, None), cache.unsqueeze(2), weights, context_lens, block_table, plan, max_context_len, clean_logits=False
        )

    def top_k_prefill(self, logits, row_starts, row_ends, out) -> torch.Tensor:
        """Columns relative to row_starts, any order; unused places of ``out`` [rows, k] stay or become -1."""
        rows, k = out.shape
        self._vllm_ops.top_k_per_row_prefill(logits, row_starts, row_ends, out, rows, *logits.stride(), k)
        return out

    @staticmethod
    def top_k_decode_name(rows: int) -> str:
        return "cooperative_topk" if rows <= COOPERATIVE_ROWS else "persistent_topk"

    def top_k_decode(self, logits, lengths, out, scratch) -> torch.Tensor:
        """As ``top_k_prefill`` for rows that start at 0. scratch: uint8 [TOP_K_SCRATCH]."""
        rows, k = out.shape
        getattr(self._vllm_ops, self.top_k_decode_name(rows))(logits, lengths, out, scratch, k, logits.shape[1])
        return out

    def slots(self, request_ids, block_table, positions, block_size: int) -> torch.Tensor:
        """Cache slots of request-local positions [rows, k], -1 for -1."""
        convert = self._index_conversion.triton_convert_req_index_to_global_index
        return convert(request_ids, block_table, positions, block_size, positions.shape[1])

    @functools.cached_property
    def _flash_mla(self) -> ModuleType:
        return self._import("vllm.third_party.flashmla.flash_mla_interface")

    @functools.cached_property
    def _deep_gemm(self) -> ModuleType:
        _preload("nvrtc")
        module = self._import("vllm.third_party.deep_gemm")
        module.set_pdl(True)  # as vLLM does on sm_90
        if __name__ != "__main__":
            compile_side_by_side(self.root)
        return module

    @functools.cached_property
    def _vllm_ops(self):
        self._import("vllm._C_stable_libtorch")
        return torch.ops._C

    @functools.cached_property
    def _index_conversion(self) -> ModuleType:
        self._import("vllm.triton_utils")
        path = self.root / "triton_peers" / "sparse_utils.py"
        spec = importlib.util.spec_from_file_location("triton_peers_sparse_utils", path)
        module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module

    def _import(self, name: str) -> ModuleType:
        """Import from the unpacked tree, past vLLM's own __init__ and whatever that would pull in."""
        if "vllm" not in sys.modules:
            package = sys.modules["vllm"] = types.ModuleType("vllm")
            package.__path__ = [str(self.root / "vllm")]
            triton_utils = sys.modules["vllm.triton_utils"] = types.ModuleType("vllm.triton_utils")
            triton_utils.triton = importlib.import_module("triton")
            triton_utils.tl = importlib.import_module("triton.language")
        return importlib.import_module(name)


def padded_heads(q: torch.Tensor, dim: int = -2) -> torch.Tensor:
    """q with zeros for the heads that FlashMLA wants more, 64 at least."""
    spare = max(0, HEADS - q.shape[dim])
    if not spare:
        return q
    after = -1 - range(q.dim())[dim] + q.dim()  # dimensions behind it
    return torch.nn.functional.pad(q, (0, 0) * after + (0, spare))


def own_heads(output: tuple[torch.Tensor, torch.Tensor | None], heads: int) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(out [tokens, heads, d_v], lse [tokens, heads] or None) without what padded_heads added."""
    out, lse = output
    return out[:, :heads], None if lse is None else lse[:, :heads]


def load() -> Peers | None:
    """The peers under PEERS_DIR; None where the variable is not set."""
    if not os.environ.get(VARIABLE):
        return None
    root = Path(os.environ[VARIABLE]).expanduser().resolve()
    if not (root / "vllm").is_dir():
        raise ValueError(f"{VARIABLE}: got {root}, allowed: a folder that holds vllm/ and triton_peers/")
    return Peers(root)


def _preload(library: str) -> None:
    """Make a CUDA library known that PyTorch brings along but loads only on demand."""
    name = f"lib{library}.so.{(torch.version.cuda or '').split('.')[0]}"
    beside_torch = Path(torch.__file__).parents[1].glob(f"nvidia/*/lib/{name}")
    for candidate in (name, *map(str, beside_torch)):
        try:
            ctypes.CDLL(candidate, mode=ctypes.RTLD_GLOBAL)
            return
        except OSError:
            continue


def compile_side_by_side(root: Path) -> None:
    """Fill DeepGEMM's cache on disk: a process per item of KERNELS."""
    command = [sys.executable, "-m", "benchmarks.peers"]
    scripts = Path(__file__).resolve().parent.parent
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    environment = {**os.environ, VARIABLE: str(root)}
    children = [subprocess.Popen([*command, what], cwd=scripts, env=environment, **pipes) for what in KERNELS]
    outputs = [child.communicate()[0] for child in children]
    for what, child, output in zip(KERNELS, children, outputs):
        if child.returncode:
            raise RuntimeError(f"DeepGEMM's {what!r} did not compile, exit code {child.returncode}:\n{output[-2000:]}")


def _compile(what: str) -> None:
    peers, (kind, *number) = load(), what.split()
    size = int(number[0]) if number else 0
    cuda = functools.partial(torch.zeros, device="cuda")
    if kind == "scores":
        rows = cuda(128, dtype=torch.int32)
        q, k = cuda(128, 64, 128).to(torch.float8_e4m3fn), cuda(512, 128).to(torch.float8_e4m3fn)
        peers.scores(q, k, cuda(512), cuda(128, 64), rows, rows + 500)
    elif kind == "paged":
        lengths, table = cuda(2, size, dtype=torch.int32) + 500, cuda(2, 8, dtype=torch.int32)
        q, cache = cuda(2, size, 64, 128).to(torch.float8_e4m3fn), cuda(8, 64, 132, dtype=torch.uint8)
        peers.paged_scores(q, cache, cuda(2 * size, 64), lengths, table, peers.paged_plan(lengths, 64), 512)
    else:
        for next_n in (1, 2):
            peers.paged_plan(cuda(size, next_n, dtype=torch.int32) + 500, 64)
    torch.cuda.synchronize()


if __name__ == "__main__":
    _compile(" ".join(sys.argv[1:]))
