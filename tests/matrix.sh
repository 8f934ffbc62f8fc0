#!/usr/bin/env bash
# Run the tests on another Python, in a venv of its own: bash tests/matrix.sh 3.13 [arguments of pytest]
# pip takes the CUDA build of torch where there is no other: 5.3 GB for a venv.
set -euo pipefail
cd "$(dirname "$0")/.."
wanted=${1:?name a Python, for example 3.13}
shift
python=$(command -v "python$wanted" || true)
if ! "$python" -V > /dev/null 2>&1; then  # pyenv's names work for its chosen versions alone
    python=$(pyenv prefix "$wanted")/bin/python
fi
PYTHON=$python VENV=.venv-$wanted bash tests/run.sh "$@" && failed=0 || failed=$?
".venv-$wanted/bin/pip" list 2> /dev/null | grep -E "^(torch|megatron-core) " || true
echo "Python $wanted: $SECONDS seconds"
exit "$failed"
