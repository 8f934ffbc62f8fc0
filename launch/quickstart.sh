#!/usr/bin/env bash
# From nothing to a trained model: make .venv, install, train the tiny DPO on two CPU processes.
# Arguments are config overrides: bash launch/quickstart.sh dpo.beta=0.05 output_dir=runs/beta
set -euo pipefail
cd "$(dirname "$0")/.."
export OMP_NUM_THREADS=1 TOKENIZERS_PARALLELISM=false PIP_DISABLE_PIP_VERSION_CHECK=1
# Both processes are here: keep gloo off the other network interfaces.
[ "$(uname)" != Linux ] || export GLOO_SOCKET_IFNAME=lo

if [ ! -x .venv/bin/python ]; then
    python=$(bash launch/python.sh)
    "$python" -m venv .venv
    # The pip of Python 3.11 takes twice as long as a new one to find all versions.
    .venv/bin/python -m pip install -q --no-compile --upgrade pip
fi
# Compiling all that is installed takes longer than what is imported, by whoever does so first.
.venv/bin/pip install -q --no-compile -e . -c constraints.txt
.venv/bin/torchrun --standalone --local-addr 127.0.0.1 --nproc-per-node 2 \
    launch/train.py --config dpo_tiny "$@"
