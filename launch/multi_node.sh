#!/usr/bin/env bash
# Start one node of a job; run the same line on every node. If a rank dies, or a node or its link is
# lost, all ranks are restarted once all nodes are there (again), up to MAX_RESTARTS times, and resume
# from the last checkpoint (checkpoint.save_every > 0).
#   NNODES=2 HEAD=node0:29500 bash launch/multi_node.sh --config dpo_70b [key=value ...]
# NNODES        nodes of the job
# HEAD          host:port where the nodes meet: one of them (a name, an address or [an IPv6 one]),
#               the same on all. GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME, if not set, are the
#               interface of the route to it
# NPROC         processes on this node (default: its GPUs)
# JOB           any name that two jobs with the same HEAD do not share
# MAX_RESTARTS  default 3; counted by the head
# JOIN_TIMEOUT  seconds that nodes wait for each other (default 600)
set -euo pipefail
: "${NNODES:?how many nodes}" "${HEAD:?host:port where the nodes meet}"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" TOKENIZERS_PARALLELISM=false
exec python "$(dirname "$0")/multi_node.py" "$@"
