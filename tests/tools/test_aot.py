"""scripts/aot.py: every target compiles, and what a kernel may not do is reported."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from conftest import long

from sparse_attn.testing.launches import TARGETS


@pytest.mark.aot
@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles(target):
    import aot

    sample = [] if long() or target == "sm_90" else ["--sample"]
    assert aot.main(["--target", target, "--jobs", "1", *sample]) == 0


def test_a_sample_leaves_out_no_kernel():
    import aot

    for target in ("sm_80", "gfx942"):
        work, _ = aot.gather([target], [""], False)
        drawn = aot.sample(work)
        names = [aot.kernel_name(launch) for launch in drawn]
        assert len(set(names)) == len(names) and set(names) == {aot.kernel_name(launch) for launch in work}
        assert all(work[launch] == cases for launch, cases in drawn.items()) and drawn == aot.sample(work)


@pytest.mark.aot
def test_a_launch_that_starts_early_waits_before_it_reads():
    import aot

    assert aot.main(["--target", "sm_90", "--kernel", "attention.sparse.portable.combine", "--jobs", "1"]) == 0


@pytest.mark.aot
@pytest.mark.parametrize(
    "kernel, waits",
    [
        ("hopper.swap_ab.attend", 3),
        ("hopper.prefill_bf16.attend", 1),
        ("topk.select.algorithms.multi_pass.bound_rows", 1),
    ],
)
def test_a_wait_that_is_missing_is_seen(kernel, waits):
    """Of warps that wait for themselves, of those that wait for all they start, and where there are no others."""
    import aot
    from aot_cases.waits import WAITS, reaches_memory_early

    from sparse_attn.testing.launches import compile_launch

    launch, *_ = aot.gather(["sm_90"], [kernel], False)[0]
    before, *behind = compile_launch(launch).assembly["ptx"].split(f"{WAITS};")
    assert len(behind) == waits and not reaches_memory_early(f"{WAITS};".join([before, *behind]))
    for missing in range(waits):
        ptx = before + "".join(f"{WAITS if at != missing else ''};{part}" for at, part in enumerate(behind))
        assert reaches_memory_early(ptx)


@pytest.mark.aot
def test_what_may_be_read_early():
    """Scores, where a launch before has waited for them, and weights; nothing else."""
    import aot
    from aot_cases.verdict import early_reads
    from aot_cases.waits import WAITS, reaches_memory_early

    from sparse_attn.testing.launches import compile_launch

    for launch in aot.gather(["sm_90"], ["rank_topk", "stream_k"], True)[0]:
        compiled = compile_launch(launch)
        ptx, early = compiled.assembly["ptx"], early_reads(aot.kernel_name(launch), compiled)
        assert not reaches_memory_early(ptx, early) and reaches_memory_early(ptx.replace(f"{WAITS};", ""), early)
        assert all(reaches_memory_early(ptx, [at for at in early if at != missing]) for missing in early)


@pytest.mark.aot
def test_claimed_memory_is_what_is_declared():
    """Not what the system takes of every program on sm_90."""
    import aot

    from sparse_attn.device import histogram
    from sparse_attn.testing.launches import compile_launch

    claimed = {}
    for name in ("attention.sparse.portable.combine", "topk.select.algorithms.multi_pass.bound_rows"):
        work, _ = aot.gather(["sm_90"], [name], False)
        compiled = [compile_launch(launch) for launch in work]
        claimed[name] = {one.claimed for one in compiled}
        assert any(one.shared_memory > one.claimed for one in compiled)
    assert claimed == {
        "attention.sparse.portable.combine": {0},
        "topk.select.algorithms.multi_pass.bound_rows": {4 * histogram.WORDS.value},
    }


@pytest.mark.aot
def test_failures_are_reported(monkeypatch, capsys):
    import aot

    assert aot.main(["--target", "gfx942", "--kernel", "router", "--jobs", "1"]) == 0
    small = replace(TARGETS["gfx942"], warp_size=32)
    monkeypatch.setitem(TARGETS, "gfx942", small)
    assert aot.main(["--target", "gfx942", "--kernel", "router", "--jobs", "1"]) == 1
    said = capsys.readouterr().out.split("kernels, 1 compilations, 0 failures")[1]
    assert "waves of 64, the target's have 32" in said and "1 kernels, 1 compilations, 1 failures" in said


def test_verdict():
    from aot_cases.verdict import failures

    from sparse_attn.testing.aot import Compiled

    ptx = {"ptx": "cvt.rn.f16x2.e4m3x2 %r1, %rs1;"}
    bad = Compiled(200000, 0, 255, 64, 2048, 64, 0, ptx)
    wrong = failures("sm_80", "package.kernel", TARGETS["sm_80"], bad)
    assert len(wrong) == 5 and "an fp8 instruction, e4m3" in wrong[-1]
    assert not failures("sm_89", "package.kernel", TARGETS["sm_89"], Compiled(0, 0, 255, 0, 128, 32, 0, ptx))
    asking = Compiled(50000, 9000, 255, 0, 128, 32, 0, ptx)
    assert "more than a launch grants" in failures("sm_90", "package.kernel", TARGETS["sm_90"], asking)[0]
    load, wait = "\t@%p1 ld.global.b32 { %r1 }, [ %rd1 + 0 ];\n", "\tgriddepcontrol.wait; // for %r0\n"
    early = ["ld.global.b32"]
    for text, expected in ((wait + load, []), (load + wait, early), (load, early), ("ld.param.b64", [])):
        compiled = Compiled(0, 0, 32, 0, 128, 32, 0, {"ptx": text})
        assert [
            found.split()[1] for found in failures("sm_90", "package.kernel", TARGETS["sm_90"], compiled)
        ] == expected
        assert not failures("sm_80", "package.kernel", TARGETS["sm_80"], compiled)


def test_memory_of_barriers():
    from aot_cases.verdict import failures

    from sparse_attn.testing.aot import Compiled

    def found(*lines):
        begun = "mov.b32 \t%r1, global_smem;\nadd.s32 \t%r2, %r1, 64;\n@%p1 mbarrier.init.shared::cta.b64 [%r2], 1;\n"
        compiled = Compiled(0, 0, 32, 0, 128, 32, 0, {"ptx": begun + "\n".join(lines)})
        return failures("sm_90", "package.kernel", TARGETS["sm_90"], compiled)

    assert not found("st.shared.b32 [global_smem+60], %r9;", "st.shared.b32 [%r1+72], %r9;")
    assert not found("mbarrier.arrive.shared::cta.b64 _, [%r2];", "st.shared.b32 [%r3], %r9;")
    for access in ("st.shared.b32 [global_smem+68], %r9;", "ld.shared.b32 %r9, [%r2];", "ld.shared.b32 %r9, [%r1+64];"):
        assert found(access) == [f"{access} in the memory of an mbarrier"]


def test_every_case_launches_something_on_every_target():
    from aot_cases import all_cases

    from sparse_attn.testing.launches import recording

    for target in TARGETS:
        for case in all_cases():
            with recording(target) as launches:
                case.launcher(*case.arguments)
            assert launches, f"{case.op}: {case.name}"
            assert all(launch.target == target for launch in launches)
            assert {'"launch_pdl": true' in launch.specialisation for launch in launches} == {TARGETS[target].has_pdl}


@pytest.mark.few(1)
@pytest.mark.parametrize("target", ["sm_90", "sm_100", "gfx942"])
def test_no_runtime_size_is_a_constant(target):
    """Arithmetic with a tl.constexpr on the host makes one, and a kernel is compiled for every value of it."""
    from aot_cases import all_cases

    from sparse_attn.testing.launches import recording

    for case in all_cases():
        with recording(target) as launches:
            case.launcher(*case.arguments)
        for launch in launches:
            assert '{"constexpr":' not in launch.specialisation, f"{case.op}: {case.name}: {launch.kernel}"


def test_every_kernel_of_every_operator_package_is_among_the_cases():
    """A jitted function that some launcher launches: found by its launch in the sources."""
    import ast
    import re

    from aot import gather

    import sparse_attn

    def scopes(source):
        """(nodes that name things in it, text) of every function: a name may stand for another module in each."""
        tree = ast.parse(source)
        for function in filter(lambda node: isinstance(node, ast.FunctionDef), tree.body):
            yield [*tree.body, *ast.walk(function)], ast.get_source_segment(source, function)

    root = Path(sparse_attn.__file__).parent.parent
    launched = set()
    for path in (root / "sparse_attn" / "ops").rglob("*.py"):
        own = ".".join(path.relative_to(root).with_suffix("").parts)
        for scope, text in scopes(path.read_text()):
            imported = [node for node in scope if isinstance(node, ast.ImportFrom)]
            modules = {
                name.asname or name.name: f"{node.module}.{name.name}" for node in imported for name in node.names
            }
            for match in re.finditer(r"^ +(?:(\w+)\.)?(\w+)\[(?:\(|grid\]|ctas\])", text, re.M):
                module = (
                    modules[match[1]] if match[1] else modules.get(match[2], f"{own}.{match[2]}").rpartition(".")[0]
                )
                launched.add(f"{module.removeprefix('sparse_attn.ops.').replace('.kernels', '')}.{match[2]}")
    work, _ = gather(["sm_90"], [""], False)
    from aot import kernel_name

    assert launched == {kernel_name(launch) for launch in work}


def test_a_line_of_inline_assembly_ends_where_a_statement_does():
    """Triton 3.8 tells ptxas behind every line which one it was."""
    import importlib
    import pkgutil

    import triton.language as tl

    import sparse_attn

    texts = {}
    for module in pkgutil.walk_packages(sparse_attn.__path__, "sparse_attn."):
        if module.name.startswith(("sparse_attn.device", "sparse_attn.ops")):
            for name, value in vars(importlib.import_module(module.name)).items():
                if isinstance(value, tl.constexpr) and isinstance(value.value, str) and "$0" in value.value:
                    texts[f"{module.name}.{name}"] = value.value
    assert {"append_in_range", "scatter"} <= {name.rpartition(".")[2].lower() for name in texts}
    broken = [
        name for name, text in texts.items() for line in text.split("\n")[:-1] if line.rstrip()[-1:] not in ";:{}"
    ]
    assert broken == []
