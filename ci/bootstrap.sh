# Sourced by ./ci/gate and ./ci/test: makes .venv with the pinned requirements where it is absent or out of date, and sets
# $python to its interpreter. $PYTHON chooses the Python that a new .venv is made with.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python="$root/.venv/bin/python"
pins="$root/ci/requirements.txt"

recent() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; }

if [ ! -x "$python" ]; then
    for candidate in "${PYTHON:-python3}" python3 python python3.13 python3.12 python3.11; do
        if recent "$candidate"; then found=$candidate && break; fi
    done
    if [ -z "${found:-}" ]; then
        echo "ragged-oracle: Python 3.11 or newer is needed; set PYTHON=/path/to/python" >&2
        exit 2
    fi
    "$found" -m venv "$root/.venv" || { echo "ragged-oracle: $found can't make a venv (python3-venv missing?)" >&2; exit 2; }
fi
if ! cmp -s "$pins" "$root/.venv/installed.txt"; then
    "$python" -m pip install --quiet --disable-pip-version-check -r "$pins" || { echo "ragged-oracle: pip install failed" >&2; exit 2; }
    cp "$pins" "$root/.venv/installed.txt"
fi
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
