"""The integrations with engines, where there are none: what they are called by, and what their entry points do."""

import ast
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import engine_hooks
import pytest
import torch

from sparse_attn.integrations import sglang, vllm
from sparse_attn.integrations.vllm.versions import VARIABLE, VERSIONS

FOLDER = Path(vllm.__file__).parent
TABLE = json.loads(engine_hooks.TABLE.read_text())


def ours(file, name):
    return engine_hooks.signature(ast.parse((FOLDER / file).read_text()), name)


def versions():
    return [pytest.param(hooks, id=version) for version, hooks in TABLE["vllm"].items()]


def test_every_version_that_is_taken_was_compared():
    assert {version.rpartition(".")[0] for version in TABLE["vllm"]} == set(VERSIONS)
    assert set(TABLE["sglang"]) == set(sglang.VERSIONS)
    for engine, files in engine_hooks.HOOKS.items():
        names = {f"{file}:{name}" for file, those in files.items() for name in those}
        assert all(set(hooks) == names and None not in hooks.values() for hooks in TABLE[engine].values())


@pytest.mark.parametrize("hooks", versions())
@pytest.mark.parametrize("hook, file, name", [
    ("v1/attention/backend.py:AttentionMetadataBuilder.__init__", "backend.py", "SparseAttnMetadataBuilder.__init__"),
    ("v1/attention/backend.py:AttentionMetadataBuilder.build", "backend.py", "SparseAttnMetadataBuilder.build"),
    ("v1/attention/backend.py:MLAAttentionImpl.do_kv_cache_update", "backend.py", "SparseAttnImpl.do_kv_cache_update"),
    ("v1/attention/backend.py:MLAAttentionImpl.forward_mqa", "backend.py", "SparseAttnImpl.forward_mqa"),
    ("v1/attention/backend.py:AttentionMetadataBuilder.build", "windowed.py", "WindowedMetadataBuilder.build"),
    ("models/deepseek_v4/cpu/cpu_sparse.py:DeepseekV4CPUAttention._sparse_indexer_and_attn", "windowed.py",
     "SparseAttnWindowedAttention._sparse_indexer_and_attn"),
    ("platforms/interface.py:Platform.get_attn_backend_cls", "hooks.py", "install.get_attn_backend_cls"),
])  # fmt: skip
def test_what_vllm_calls_has_its_parameters(hooks, hook, file, name):
    assert ours(file, name) == hooks[hook]


@pytest.mark.parametrize("hooks", versions())
def test_what_takes_more_takes_theirs(hooks):
    theirs = hooks["v1/attention/backend.py:MLAAttentionImpl.__init__"].split(", ")
    mine = ours("backend.py", "SparseAttnImpl.__init__").split(", ")
    assert mine[: mine.index("*")] == theirs[: mine.index("*")] and mine[-1] == "**given"
    assert set(mine[mine.index("*") + 1 : -1]) <= set(theirs)
    indexer = hooks["model_executor/models/deepseek_v2.py:Indexer.forward"]
    assert ours("layer.py", "run_indexer") == indexer.replace("self", "indexer, rope")


@pytest.mark.parametrize("hooks", versions())
@pytest.mark.parametrize("file, variable, fields", [
    ("windowed.py", "common", "v1/attention/backend.py:CommonAttentionMetadata"),
    ("backend.py", "common", "v1/attention/backend.py:CommonAttentionMetadata"),
    ("layer.py", "context", "forward_context.py:ForwardContext"),
])  # fmt: skip
def test_fields_that_are_read_exist(hooks, file, variable, fields):
    read = set(re.findall(rf"\b{variable}\.(\w+)", (FOLDER / file).read_text()))
    assert read and read <= set(hooks[fields].split(", "))


STUBS = """
import sys, types

class Platform:
    @classmethod
    def get_attn_backend_cls(cls, selected_backend, attn_selector_config, num_heads=None):
        return "theirs"

def module(name, **values):
    sys.modules[name] = types.ModuleType(name)
    vars(sys.modules[name]).update(values)

def asked(sparse):
    config = types.SimpleNamespace(use_mla=True, use_sparse=sparse)
    return Platform.get_attn_backend_cls(None, config)

module("vllm", __version__=VERSION)
module("vllm.platforms", current_platform=Platform())
registry, models = types.SimpleNamespace(register_model=lambda name, place: models.update({name: place})), {}
module("vllm.model_executor.models", ModelRegistry=registry)
from sparse_attn.integrations.vllm import register
before = set(sys.modules)
register(), register()
print(asked(False), sorted(set(sys.modules) - before), *models)
try:
    print(asked(True))
except RuntimeError as error:
    print(error)
"""


@pytest.mark.parametrize("version, variable, said", [
    ("0.32.0", None, "theirs []\ntheirs"),
    ("0.32.0", "0", "theirs []\ntheirs"),
    ("9.1.0", "1", "theirs ['sparse_attn.integrations.vllm.hooks'] DeepseekV4ForCausalLM\nSPARSE_ATTN_VLLM is set, and sparse_attn cannot serve "
     "this vLLM: vllm: got version 9.1.0, allowed: 0.32"),
    ("0.32.0", "yes", "theirs ['sparse_attn.integrations.vllm.hooks'] DeepseekV4ForCausalLM\nSPARSE_ATTN_VLLM is set, and sparse_attn cannot "
     "serve this vLLM: SPARSE_ATTN_VLLM: got 'yes', allowed: 1, or 0 for vLLM's own"),
    ("0.32.0", "1", "theirs ['sparse_attn.integrations.vllm.hooks'] DeepseekV4ForCausalLM\nSPARSE_ATTN_VLLM is set, and sparse_attn cannot "
     "serve this vLLM: No module named 'vllm.v1'; 'vllm' is not a package"),
])  # fmt: skip
def test_the_entry_point_raises_nothing_and_sparse_layers_what_went_wrong(version, variable, said):
    env = {name: value for name, value in os.environ.items() if name != VARIABLE}
    env |= {VARIABLE: variable} if variable else {}
    code = STUBS.replace("VERSION", repr(version))
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == said


@pytest.mark.parametrize("group, module", [("vllm.general_plugins", vllm), ("sglang.srt.plugins", sglang)])
def test_entry_points_are_those_that_setup_names(group, module):
    named = re.search(rf"\n{group} =\n    sparse_attn = (\S+)", Path("setup.cfg").read_text())
    assert named and named[1] == f"{module.__name__}:{module.register.__name__}"


@pytest.fixture
def hooked(monkeypatch):
    """What SGLang's registry is given, with these variables of the environment."""

    def given(version="0.5.23", **variables):
        found = []
        registry = SimpleNamespace(
            HookRegistry=SimpleNamespace(register=lambda *args: found.append(args)),
            HookType=SimpleNamespace(REPLACE="replace"),
        )
        monkeypatch.setitem(sys.modules, "sglang.srt.plugins.hook_registry", registry)
        monkeypatch.setattr(sglang.metadata, "version", lambda package: version)
        for name in (sglang.VARIABLE, sglang.FUSED):
            monkeypatch.setenv(name, variables[name]) if name in variables else monkeypatch.delenv(name, raising=False)
        sglang.register()
        return found

    yield given


def test_sglang_without_the_variable(hooked):
    assert hooked() == hooked(SPARSE_ATTN_SGLANG="0") == [] and sglang.FUSED not in os.environ


def test_sglang_selects_by_our_operator(hooked):
    target, hook, kind = hooked(SPARSE_ATTN_SGLANG="1")[0]
    assert (target, kind, os.environ[sglang.FUSED]) == (sglang.TARGET, "replace", "0")
    assert target.endswith("dsa_topk_backend.DSATopKBackend.topk_func")
    theirs = TABLE["sglang"]["0.5.23"]["srt/layers/attention/dsa/dsa_topk_backend.py:DSATopKBackend.topk_func"]
    assert ", ".join(inspect.signature(hook).parameters) == theirs

    wide = torch.randn(5, 90, generator=torch.Generator().manual_seed(1)).round(decimals=1)
    wide[:, 80:] = float("nan")  # what DeepGEMM pads rows by
    score, lengths = wide[:, :80], torch.tensor([0, 3, 40, 60, -2], dtype=torch.int64)
    for starts in (None, torch.tensor([0, 77, 20, 11, 5], dtype=torch.int64)):
        found = hook("any backend", score, lengths, 16, row_starts=starts)
        assert found.dtype == torch.int32 and found.shape == (5, 16)
        for row, length in enumerate(lengths.clamp(min=0).tolist()):
            first = 0 if starts is None else int(starts[row])
            keys = score[row, first : first + length]
            best = keys.sort(descending=True, stable=True).indices[:16].sort().values.tolist()
            assert found[row].tolist() == best + [-1] * (16 - len(best))


@pytest.mark.parametrize("version, variables, problem", [
    ("0.5.24", dict(SPARSE_ATTN_SGLANG="1"), "sglang: got version 0.5.24, allowed: 0.5.23"),
    ("0.5.23", dict(SPARSE_ATTN_SGLANG="all"), "SPARSE_ATTN_SGLANG: got 'all', allowed: 1, or 0 for SGLang's own"),
    ("0.5.23", dict(SPARSE_ATTN_SGLANG="1", SGLANG_DSA_FUSE_TOPK="True"),
     "SGLANG_DSA_FUSE_TOPK: got 'True', allowed: 0 with SPARSE_ATTN_SGLANG"),
])  # fmt: skip
def test_what_sglang_would_pass_over_in_silence_is_raised_by_the_first_selection(hooked, version, variables, problem):
    _, hook, _ = hooked(version, **variables)[0]
    with pytest.raises(RuntimeError, match=re.escape(f"sparse_attn cannot select: {problem}")):
        hook("any backend", torch.zeros(1, 4), torch.tensor([4]), 2)


def test_the_comparison_names_what_moved(tmp_path, capsys, monkeypatch):
    import zipfile

    def wheel(version, body):
        with zipfile.ZipFile(tmp_path / f"vllm-{version}-py3-none-any.whl", "w") as file:
            file.writestr("vllm/forward_context.py", body)
        return str(tmp_path / f"vllm-{version}-py3-none-any.whl")

    monkeypatch.setattr(engine_hooks, "TABLE", tmp_path / "table.json")
    first = wheel("1.9.0", "class ForwardContext:\n    attn_metadata: int\n    def f(self): ...\n")
    assert engine_hooks.main([first, "--write"]) == 0
    assert engine_hooks.main([wheel("1.10.0", "class ForwardContext:\n    metadata: int\n")]) == 1
    assert "forward_context.py:ForwardContext\n  1.9.0: attn_metadata\n  1.10.0: metadata" in capsys.readouterr().out
    assert engine_hooks.main([first]) == 0 and list(json.loads(engine_hooks.TABLE.read_text())["vllm"]) == ["1.9.0"]
