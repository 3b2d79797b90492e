# Sourced by test.sh and demo.sh: enters the repository and sets `python`.
# PYTHON=... names an environment that has what is needed; otherwise a local .venv is made and filled once.

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)

find_python() {
    local candidate
    for candidate in python3 python3.13 python3.12 python3.11 python; do
        if "$candidate" -c 'import sys, venv; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
            echo "$candidate"
            return
        fi
    done
    echo "no Python >= 3.11 with the venv module found; install one, or set PYTHON to an environment's python" >&2
    return 1
}

if [ -n "${PYTHON:-}" ]; then
    python=$(command -v "$PYTHON") || { echo "PYTHON=$PYTHON: no such program" >&2; exit 1; }
    case $python in /*) ;; *) python=$PWD/$python ;; esac
    cd "$root"
else
    cd "$root"
    python=$root/.venv/bin/python
    wanted=$(cat setup.cfg scripts/constraints.txt | cksum)
    if [ "$(cat .venv/installed 2>/dev/null)" != "$wanted" ]; then
        base=$(find_python)
        "$base" -m venv .venv
        "$python" -m pip install -q -c scripts/constraints.txt setuptools
        "$python" -m pip install -c scripts/constraints.txt --no-build-isolation --use-pep517 -e '.[models,test]'
        echo "$wanted" >.venv/installed
    fi
fi
