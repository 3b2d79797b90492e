# Sourced by test.sh and demo.sh: enters the repository and sets `python`.
# PYTHON=... names an environment that has what is needed; otherwise a local .venv is made and filled once, with what
# the tests need, or where purpose=demo with what demo.sh needs.

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

holds() { # holds STAMP: whether .venv was filled from the files as they are
    [ "$(cat ".venv/$1" 2>/dev/null)" = "$wanted" ]
}

fill() { # fill STAMP REQUIREMENTS...
    local base stamp=$1
    shift
    base=$(find_python)
    "$base" -m venv .venv
    "$python" -m pip install -q -c scripts/constraints.txt setuptools
    "$python" -m pip install -c scripts/constraints.txt --no-build-isolation --use-pep517 "$@"
    echo "$wanted" >".venv/$stamp"
}

if [ -n "${PYTHON:-}" ]; then
    python=$(command -v "$PYTHON") || { echo "PYTHON=$PYTHON: no such program" >&2; exit 1; }
    case $python in /*) ;; *) python=$PWD/$python ;; esac
    cd "$root"
else
    cd "$root"
    python=$root/.venv/bin/python
    wanted=$(cat setup.cfg scripts/constraints.txt | cksum)
    if [ "${purpose:-tests}" = demo ]; then
        if ! holds installed && ! holds installed-demo; then
            cat >&2 <<'END'
Once: .venv gets torch, its CUDA libraries and triton (5.3 GB on disk) and 0.15 GB beside them; of about 3 GB to
download, some 5 minutes at 100 Mbit/s. PyTorch's CPU build, of 0.2 GB to download, is enough:
    python3 -m venv cpu
    cpu/bin/pip install torch --index-url https://download.pytorch.org/whl/cpu
    cpu/bin/pip install safetensors
    PYTHON=cpu/bin/python scripts/demo.sh
END
            fill installed-demo -e . safetensors tqdm
        fi
    elif ! holds installed; then
        echo "Once: .venv gets torch, its CUDA libraries, triton and what the tests take, 6.1 GB on disk" >&2
        fill installed -e '.[models,test]'
    fi
fi
