#!/usr/bin/env bash
# Run a command on several hosts of this machine, which have networks and names of their own (root):
#   bash tools/cluster.sh 2 --rate 400mbit -- bash launch/multi_node.sh --config dpo_tiny
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python}" -m tests.cluster "$@"
