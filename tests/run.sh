#!/usr/bin/env bash
# Make .venv (or $VENV), install, lint, check types and import layers, run the tests.
# Arguments go to pytest: bash tests/run.sh tests/unit -k load (-n 0: in one process, for a debugger)
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PIP_DISABLE_PIP_VERSION_CHECK=1
unset PYTHONDONTWRITEBYTECODE  # where it is set, every process compiles all sources anew

venv=${VENV:-.venv}
if [ ! -x "$venv/bin/python" ]; then
    python=$(bash launch/python.sh)
    "$python" -m venv "$venv"
    # The pip of Python 3.11 takes twice as long as a new one to find all versions.
    "$venv/bin/python" -m pip install -q --no-compile --upgrade pip
fi
# Compiling all that is installed takes longer than what is imported, by whoever does so first.
"$venv/bin/pip" install -q --no-compile -e ".[test]" -c constraints.txt
export PATH="$(cd "$venv/bin" && pwd):$PATH"

ruff check .
ruff format --check .
lint-imports
# Types are checked beside the tests, which leave the processors idle for some of their time; node
# spends an eighth less on it with a larger young generation.
types=$(mktemp)
trap 'rm -f "$types"' EXIT
NODE_OPTIONS=--max-semi-space-size=128 nice pyright --pythonpath "$venv/bin/python" \
    > "$types" 2>&1 & checking=$!
failed=0
# In a new environment one process compiles what the tests import; each worker would compile it all.
[ -d tests/unit/__pycache__ ] || python -m pytest --collect-only -q "$@" > /dev/null || true
# Three workers, for two processors: many tests wait. They take whole files, so that fixtures of a
# module are made once; long ones come first.
python -m pytest -n 3 --dist loadfile --no-loadscope-reorder -m "not slow and not gpu" "$@" || failed=$?
wait "$checking" || { cat "$types"; exit 1; }
tail -n 1 "$types"
exit "$failed"
