#!/usr/bin/env bash
# compute-sanitizer over the kernel tests on a GPU, a slice per test file; a finished slice is not run again.
#   scripts/sanitize.sh [--tool memcheck|racecheck|initcheck|synccheck] [--hopper] [--only EXPRESSION] [--out DIR]
#       [tests/test_x.py ...]
# --hopper: tests of the kernels for Hopper, on such a GPU, but those of the largest tensors and those that capture a graph, for
# which memory has to be pooled. --only: of these, what pytest's -k selects, a slice of its own. PYTHON=... picks the interpreter.
# Exit 1 where a slice failed, found an error or ran over its time.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
tool=memcheck
select=(-m kernel)
keep=
only=
out=
while [ $# -gt 0 ]; do
    case $1 in
    --tool) tool=$2 && shift 2 ;;
    --hopper) select=(-m gpu) keep="not beyond_2_31 and not seventy_thousand and not capture and not replays" && shift ;;
    --only) only=$2 && shift 2 ;;
    --out) out=$2 && shift 2 ;;
    *) break ;;
    esac
done
out=${out:-out/sanitize-$tool}
if ! command -v compute-sanitizer >/dev/null; then
    echo "sanitize: compute-sanitizer is not on the PATH; it comes with the CUDA toolkit" >&2
    exit 1
fi
mkdir -p "$out"
[ -n "$keep$only" ] && select+=(-k "${keep:+$keep and }(${only:-test})")
if [ $# -gt 0 ]; then
    files=("$@")
elif [ "${select[1]}" = gpu ]; then
    files=(tests/test_attention_{prefill_bf16,decode_fp8,decode_fp8_latents,swap_ab}.py tests/test_*hopper*.py)
else
    mapfile -t files < <(grep -lE 'mark\.kernel' tests/test_*.py)
fi

# Small cases, and memory that is not pooled, so that every tensor has bounds of its own.
export SPARSE_ATTN_SMALL=1 PYTORCH_NO_CUDA_MEMORY_CACHING=1
status=0
printf '%-36s %-8s %s\n' "$tool" tests errors
for file in "${files[@]}"; do
    name=$(basename "$file" .py)${only:+"($only)"}
    report=$out/$name
    if [ ! -e "$report.done" ]; then
        timeout 540 compute-sanitizer --tool "$tool" --target-processes all \
            "$python" -m pytest -q -p no:cacheprovider "${select[@]}" "$file" >"$report.log" 2>&1
        code=$?
        [ $code -eq 124 ] && echo "sanitize: ran over 540 s" >>"$report.log"
        passed=$(grep -oE '[0-9]+ passed' "$report.log" | tail -1)
        errors=$(grep -oE 'ERROR SUMMARY: [0-9]+|RACECHECK SUMMARY: [0-9]+ hazards' "$report.log" | grep -oE '[0-9]+' | sort -n | tail -1)
        echo "$code ${passed%% *} ${errors:-?}" >"$report.result"
        [ $code -eq 0 ] && [ "${errors:-1}" = 0 ] && touch "$report.done"
    fi
    read -r code passed errors <"$report.result"
    printf '%-36s %-8s %s\n' "$name" "${passed:-0}" "$errors"
    { [ "$code" = 0 ] && [ "$errors" = 0 ]; } || status=1
done
exit $status
