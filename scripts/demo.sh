#!/usr/bin/env bash
# Read a real text with DeepSeek Sparse Attention and decode from it. Arguments go to `generate`; PYTHON=... uses an
# existing environment, which has torch and safetensors, instead of a local .venv. PyTorch's CPU build is enough.
set -euo pipefail
purpose=demo
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

lacking='import importlib.util as u; print(*(name for name in ("torch", "safetensors") if u.find_spec(name) is None))'
if lacks=$("$python" -c "$lacking") && [ -n "$lacks" ]; then
    echo "$python lacks $lacks: $python -m pip install $lacks" >&2
    exit 1
fi
"$python" -m sparse_attn info --short
echo
exec "$python" -m sparse_attn generate --max-new-tokens 64 "$@"
