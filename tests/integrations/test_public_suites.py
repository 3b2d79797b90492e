"""scripts/public_suites.py counts what public tests do, on sources made up here."""

import re
import sys
import unittest
from pathlib import Path

import pytest
import torch

SCRIPTS = Path(__file__).parents[2] / "scripts"
DEEP_GEMM = """
import torch
import deep_gemm
from deep_gemm.testing import near
from deep_gemm.utils import unused

def sample_mqa_cases(name, cases):
    return cases

def scores(heads, start, dtype=torch.float8_e4m3fn):
    q, k = torch.ones(3, heads, 32).to(dtype), torch.ones(9, 32).to(dtype)
    starts, ends = torch.full((3,), start, dtype=torch.int32), torch.full((3,), 9, dtype=torch.int32)
    return deep_gemm.fp8_mqa_logits(q, (k, torch.ones(9)), torch.ones(3, heads), starts, ends, clean_logits=False)

def test_mqa_logits():
    for heads, start, expected in sample_mqa_cases("prefill", [(4, 2, 128), (8, 0, 256), (4, 0, 5)]):
        assert near(scores(heads, start)[0, start], expected)

def test_paged_mqa_logits():
    for dtype, in sample_mqa_cases("paged", [(torch.float8_e4m3fn,), (torch.int16,)]):
        scores(4, 0, dtype)
"""
HELPER = """
import torch
import flash_mla

NAN = %s

class Counter:
    count = 0

    def next(self):
        self.count += 1
        return self.count - 1

def run(width):
    print(f"Running on {width}")
    q, kv = torch.zeros(2, 4, width).bfloat16(), torch.zeros(5, 1, width).bfloat16()
    indices = torch.zeros(2, 1, 8, dtype=torch.int32)
    return flash_mla.flash_mla_sparse_fwd(q, kv, indices, 0.1)[0].isnan().any().item() == NAN
"""
PREFILL = """
import sys
from helper import run

if __name__ == "__main__":
    cases = %s
    found = [run(case) for case in cases]
    if not all(found):
        print(f"{found.count(False)} / {len(cases)} cases failed")
        sys.exit(1)
"""
DECODING = """
import sys
from helper import Counter, run

_counter = Counter()

def gen_testcase():
    return list(enumerate(%s))

def test_flash_mla(place, width):
    seed = _counter.next()
    assert seed == place, (seed, place)
    return run(abs(width)) and width > 0

def main():
    cases = gen_testcase()
    print(f"{len(cases)} testcases to run")
    for case in cases:
        if not test_flash_mla(*case):
            sys.exit(1)

if __name__ == "__main__":
    main()
"""
VLLM = """
import pytest
import torch
from vllm.platforms import current_platform
from vllm.utils.torch_utils import set_random_seed

@pytest.mark.parametrize("k", (2, 3, -1))
def test_top_k_per_row(k):
    set_random_seed(0)
    logits, found = torch.arange(10.0).view(2, 5), torch.empty(2, 3, dtype=torch.int32)
    starts, ends = torch.zeros(2, dtype=torch.int32), torch.full((2,), 5, dtype=torch.int32)
    torch.ops._C.top_k_per_row_prefill(logits, starts, ends, found, 2, 5, 1, k)
    assert found[:, :k].tolist() == [[3, 4]] * 2

@pytest.mark.skipif(not current_platform.is_rocm(), reason="another GPU")
def test_top_k_per_row_elsewhere():
    assert False

@pytest.mark.parametrize("backend", ("top_k_per_row_decode", "another"))
def test_backends(backend):
    assert backend != "another"
"""


def flash_mla(prefill: str, decoding: str) -> dict[str, str]:
    """Its files, of these widths."""
    return {
        "tests/helper.py": HELPER % False,
        "tests/test_flash_mla_sparse_prefill.py": PREFILL % prefill,
        "tests/test_flash_mla_sparse_decoding.py": DECODING % decoding,
    }


class PublicSuites(unittest.TestCase):
    @pytest.fixture(autouse=True)
    def _given(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder, self.patch, self.printed = tmp_path, monkeypatch, capsys
        monkeypatch.setattr(sys, "dont_write_bytecode", True)  # sources change within a second
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))

    def counted(self, suite: str, files: dict[str, str], *options: str) -> str:
        """Over these files of a source: how many cases of each test passed, failed, were refused, skipped and not run,
        and the exit code."""
        import public_suites

        for name, text in files.items():
            (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(text)
        self.patch.setattr(sys, "argv", ["public_suites.py", suite, str(self.folder), *options])
        code = public_suites.main()
        lines = self.printed.readouterr().out.splitlines()
        counts = r"(test_\w+): (\d+) passed, (\d+) failed, (\d+) refused, (\d+) skipped, (\d+) not run"
        found = [" ".join(numbers.groups()) for line in lines if (numbers := re.fullmatch(counts, line))]
        return "; ".join([*found, f"exit code {code}"])

    def test_deep_gemm(self) -> None:
        helpers = {
            "deep_gemm/testing/__init__.py": "def near(a, b):\n    return abs(a - b) < 1e-3\n",
            "deep_gemm/utils/__init__.py": "from .._C import of_the_compiled_part\nunused = of_the_compiled_part\n",
        }
        assert self.counted("deep_gemm", {"tests/test_attention.py": DEEP_GEMM, **helpers}) == (
            "test_mqa_logits 2 1 0 0 0; test_paged_mqa_logits 1 0 1 0 0; exit code 1"
        )
        assert self.counted("deep_gemm", {}, "--part", "2/3") == (
            "test_mqa_logits 1 0 0 0 0; test_paged_mqa_logits 0 0 1 0 0; exit code 1"
        )

    def test_flash_mla(self) -> None:
        assert self.counted("flash_mla", flash_mla("[576, 512, 576]", "[576, 100, 576, 512]")) == (
            "test_flash_mla_sparse_prefill 3 0 0 0 0; test_flash_mla_sparse_decoding 1 0 1 0 2; exit code 1"
        )
        assert self.counted("flash_mla", flash_mla("[576, 512, 576]", "[512]")) == (
            "test_flash_mla_sparse_prefill 3 0 0 0 0; test_flash_mla_sparse_decoding 1 0 0 0 0; exit code 0"
        )
        assert self.counted("flash_mla", {"tests/helper.py": HELPER % True}) == (
            "test_flash_mla_sparse_prefill 0 3 0 0 0; test_flash_mla_sparse_decoding 0 1 0 0 0; exit code 1"
        )

    def test_parts_of_flash_mla(self) -> None:
        """Each case has the seed of its place among all. What prefill runs is of the first part."""
        assert self.counted("flash_mla", flash_mla("[576, 512]", "[576, 512, -576, 576, 512]")) == (
            "test_flash_mla_sparse_prefill 2 0 0 0 0; test_flash_mla_sparse_decoding 2 1 0 0 2; exit code 1"
        )
        assert self.counted("flash_mla", {}, "--part", "1/2") == (
            "test_flash_mla_sparse_prefill 2 0 0 0 0; test_flash_mla_sparse_decoding 1 1 0 0 1; exit code 1"
        )
        assert self.counted("flash_mla", {}, "--part", "2/2") == (
            "test_flash_mla_sparse_decoding 2 0 0 0 0; exit code 0"
        )

    def test_vllm(self) -> None:
        assert self.counted("vllm", {"tests/kernels/test_top_k_per_row.py": VLLM}) == (
            "test_top_k_per_row 2 1 1 1 0; exit code 1"
        )

    def test_parts_of_what_has_none(self) -> None:
        with pytest.raises(SystemExit):
            self.counted("vllm", {"tests/kernels/test_top_k_per_row.py": VLLM}, "--part", "2/3")
        assert "part: got '2/3', allowed: of flash_mla and deep_gemm" in self.printed.readouterr().err
