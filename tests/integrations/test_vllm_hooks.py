"""The integration with vLLM, where there is no vLLM: what it is called by, and what its entry point does."""

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import vllm_hooks

from sparse_attn.integrations import vllm
from sparse_attn.integrations.vllm.versions import VARIABLE, VERSIONS

FOLDER = Path(vllm.__file__).parent
TABLE = json.loads(vllm_hooks.TABLE.read_text())


def ours(file, name):
    return vllm_hooks.signature(ast.parse((FOLDER / file).read_text()), name)


def versions():
    return [pytest.param(hooks, id=version) for version, hooks in TABLE.items()]


def test_every_version_that_is_taken_was_compared():
    assert {version.rpartition(".")[0] for version in TABLE} == set(VERSIONS)
    names = {f"{file}:{name}" for file, those in vllm_hooks.HOOKS.items() for name in those}
    assert all(set(hooks) == names and None not in hooks.values() for hooks in TABLE.values())


@pytest.mark.parametrize("hooks", versions())
@pytest.mark.parametrize("hook, file, name", [
    ("v1/attention/backend.py:AttentionMetadataBuilder.__init__", "backend.py", "SparseAttnMetadataBuilder.__init__"),
    ("v1/attention/backend.py:AttentionMetadataBuilder.build", "backend.py", "SparseAttnMetadataBuilder.build"),
    ("v1/attention/backend.py:MLAAttentionImpl.do_kv_cache_update", "backend.py", "SparseAttnImpl.do_kv_cache_update"),
    ("v1/attention/backend.py:MLAAttentionImpl.forward_mqa", "backend.py", "SparseAttnImpl.forward_mqa"),
    ("platforms/interface.py:Platform.get_attn_backend_cls", "hooks.py", "install.get_attn_backend_cls"),
])  # fmt: skip
def test_what_vllm_calls_has_its_parameters(hooks, hook, file, name):
    assert ours(file, name) == hooks[hook]


@pytest.mark.parametrize("hooks", versions())
def test_what_takes_more_takes_theirs(hooks):
    theirs = hooks["v1/attention/backend.py:MLAAttentionImpl.__init__"].split(", ")
    mine = ours("backend.py", "SparseAttnImpl.__init__").split(", ")
    assert mine[: mine.index("*")] == theirs[: mine.index("*")] and mine[-1] == "**others"
    indexer = hooks["model_executor/models/deepseek_v2.py:Indexer.forward"]
    assert ours("layer.py", "run_indexer") == indexer.replace("self", "indexer, rope")


@pytest.mark.parametrize("hooks", versions())
@pytest.mark.parametrize("file, variable, fields", [
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
from sparse_attn.integrations.vllm import register
before = set(sys.modules)
register(), register()
print(asked(False), sorted(set(sys.modules) - before))
try:
    print(asked(True))
except RuntimeError as error:
    print(error)
"""


@pytest.mark.parametrize("version, variable, said", [
    ("0.32.0", None, "theirs []\ntheirs"),
    ("0.32.0", "0", "theirs []\ntheirs"),
    ("9.1.0", "1", "theirs ['sparse_attn.integrations.vllm.hooks']\nSPARSE_ATTN_VLLM is set, and sparse_attn cannot serve "
     "this vLLM: vllm: got version 9.1.0, allowed: 0.32"),
    ("0.32.0", "yes", "theirs ['sparse_attn.integrations.vllm.hooks']\nSPARSE_ATTN_VLLM is set, and sparse_attn cannot "
     "serve this vLLM: SPARSE_ATTN_VLLM: got 'yes', allowed: 1, or 0 for vLLM's own"),
    ("0.32.0", "1", "theirs ['sparse_attn.integrations.vllm.hooks']\nSPARSE_ATTN_VLLM is set, and sparse_attn cannot "
     "serve this vLLM: No module named 'vllm.v1'; 'vllm' is not a package"),
])  # fmt: skip
def test_the_entry_point_raises_nothing_and_sparse_layers_what_went_wrong(version, variable, said):
    env = {name: value for name, value in os.environ.items() if name != VARIABLE}
    env |= {VARIABLE: variable} if variable else {}
    code = STUBS.replace("VERSION", repr(version))
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == said


def test_the_entry_point_is_the_one_that_setup_names():
    named = re.search(r"vllm.general_plugins =\n    sparse_attn = (\S+)", Path("setup.cfg").read_text())
    assert named and named[1] == f"{vllm.__name__}:{vllm.register.__name__}"


def test_the_comparison_names_what_moved(tmp_path, capsys, monkeypatch):
    import zipfile

    def wheel(version, body):
        with zipfile.ZipFile(tmp_path / f"vllm-{version}-py3-none-any.whl", "w") as file:
            file.writestr("vllm/forward_context.py", body)
        return str(tmp_path / f"vllm-{version}-py3-none-any.whl")

    monkeypatch.setattr(vllm_hooks, "TABLE", tmp_path / "table.json")
    first = wheel("1.9.0", "class ForwardContext:\n    attn_metadata: int\n    def f(self): ...\n")
    assert vllm_hooks.main([first, "--write"]) == 0
    assert vllm_hooks.main([wheel("1.10.0", "class ForwardContext:\n    metadata: int\n")]) == 1
    assert "forward_context.py:ForwardContext\n  1.9.0: attn_metadata\n  1.10.0: metadata" in capsys.readouterr().out
    assert vllm_hooks.main([first]) == 0 and list(json.loads(vllm_hooks.TABLE.read_text())) == ["1.9.0"]
