#!/usr/bin/env bash
# Read a real text with DeepSeek Sparse Attention and decode from it. Arguments go to `generate`; PYTHON=... uses an
# existing environment instead of a local .venv.
set -euo pipefail
source "$(dirname "${BASH_SOURCE[0]}")/environment.sh"

"$python" -m sparse_attn info
exec "$python" -m sparse_attn generate --max-new-tokens 64 "$@"
