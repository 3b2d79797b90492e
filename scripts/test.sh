#!/usr/bin/env bash
# Run ruff and pyright, then the tests: plain, a sample of them under other defaults of torch, then Triton kernels through
# the interpreter, then ahead-of-time compilation, each in processes of its own. Arguments go to every pytest, and leave
# ruff and pyright out; PYTHON=... uses an existing environment instead of a local .venv.
# --long runs every case of the tests that otherwise draw some of theirs, the same ones every time (SPARSE_ATTN_LONG=1).
# A stage that collects no test fails, unless arguments narrowed the run and another stage ran some. Each stage says how
# long it took.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

arguments=()
for argument in "$@"; do
    if [ "$argument" = --long ]; then export SPARSE_ATTN_LONG=1; else arguments+=("$argument"); fi
done
set -- ${arguments[@]+"${arguments[@]}"}

export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
parallel=()
if "$python" -c 'import xdist' 2>/dev/null; then
    workers=$("$python" -c 'import os; print(min(8, os.cpu_count() or 1))')
    parallel=(-n "$workers")
fi

marked() { # marked NAME ARGUMENTS...: the files that have tests of a mark, quicker to collect than all; none with arguments
    [ $# -gt 1 ] || grep -rl --include='test_*.py' "mark\.$1" tests
}

failed=()
empty=()
ran=0
stage() { # stage NAME COMMAND...
    local name=$1 code=0 begun=$SECONDS
    shift
    printf '\n== %s\n' "$name"
    "$@" || code=$?
    printf '== %s took %d s\n' "$name" $((SECONDS - begun))
    case $code in
    0) ran=$((ran + 1)) ;;
    5) empty+=("$name") ;;
    *) failed+=("$name") ;;
    esac
}

lint() {
    "$python" -m ruff check --config scripts/ruff.toml . &&
        "$python" -m ruff format --config scripts/ruff.toml --check . &&
        "$python" -m basedpyright -p scripts/pyrightconfig.json --pythonpath "$python"
}

if [ $# -eq 0 ]; then
    cat <<'END'
stages, and minutes of each on 2 cores: lint 1, plain 5, other-defaults 1, interpreted 3, ahead-of-time 3 (1 where
Triton's cache holds the kernels). Arguments, such as a test file, narrow them; --long takes several times as long.
END
fi

# An environment of yours may lack these two tools; the one that is made here must not.
if [ $# -eq 0 ] && { [ -z "${PYTHON:-}" ] || "$python" -c 'import basedpyright, ruff' 2>/dev/null; }; then
    stage lint lint
fi
stage plain "$python" -m pytest "${parallel[@]}" -m "not aot" "$@"
stage other-defaults env SPARSE_ATTN_OTHER_DEFAULTS="${SPARSE_ATTN_LONG:-16}" "$python" -m pytest "${parallel[@]}" -m "not aot" "$@"
stage interpreted env TRITON_INTERPRET=1 CUDA_VISIBLE_DEVICES= HIP_VISIBLE_DEVICES= \
    "$python" -m pytest "${parallel[@]}" -m kernel $(marked kernel "$@") "$@"
stage ahead-of-time "$python" -m pytest "${parallel[@]}" -m aot $(marked aot "$@") "$@"

if [ ${#empty[@]} -gt 0 ] && { [ $# -eq 0 ] || [ $ran -eq 0 ]; }; then
    failed+=("${empty[@]/%/ (no test collected)}")
fi
if [ ${#failed[@]} -gt 0 ]; then
    printf '\nFAILED: %s\n' "$(IFS=';'; echo "${failed[*]}")" >&2
    exit 1
fi
