#!/usr/bin/env bash
# Print the Python to make .venv with: $PYTHON if it is set, else the first that fits of these.
set -euo pipefail
fits='import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))'
for name in ${PYTHON:-python3 python3.13 python3.12 python3.11 python}; do
    if "$name" -c "$fits" 2> /dev/null; then
        echo "$name"
        exit
    fi
done
echo "no Python 3.11 to 3.13 with venv found (${PYTHON:-python3} is" \
    "$("${PYTHON:-python3}" -V 2>&1 || true)): install one, and name it as PYTHON=/path/to/python" >&2
exit 1
