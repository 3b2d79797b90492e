#!/usr/bin/env bash
# Builds the site into scripts/docs/site, strictly: a warning is an error. No torch, and no GPU.
#   scripts/docs/build.sh              with mkdocs; makes a virtual environment of its own on first use
#   BUILDER=zensical scripts/docs/build.sh
#   scripts/docs/build.sh serve        shows pages as they are written
# DOCS_VENV=FOLDER: where that environment is; it takes 290 MB.

set -euo pipefail
docs=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
venv=${DOCS_VENV:-${XDG_CACHE_HOME:-$HOME/.cache}/sparse_attn-docs}
builder=${BUILDER:-mkdocs}
case $builder in mkdocs | zensical) ;; *) echo "BUILDER: got $builder, allowed: mkdocs, zensical" >&2; exit 2 ;; esac

wanted=$(cksum <"$docs/requirements.txt")
if [ "$(cat "$venv/installed" 2>/dev/null)" != "$wanted" ]; then
    python3 -m venv "$venv"
    "$venv/bin/python" -m pip install -q --disable-pip-version-check -r "$docs/requirements.txt"
    echo "$wanted" >"$venv/installed"
fi
export NO_MKDOCS_2_WARNING=1
command=${1:-build}
strict=()
[ "$command" = serve ] || strict=(--strict)
exec "$venv/bin/$builder" "$command" "${strict[@]}" -f "$docs/mkdocs.yml"
