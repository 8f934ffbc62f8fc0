#!/usr/bin/env bash
# Run the tests with the kernels of other processors, on one thread and on two: an hour and a half on
# two cores that have AVX-512. After bash tests/run.sh, which makes .venv. Arguments go to pytest.
set -uo pipefail
cd "$(dirname "$0")/.."
export TOKENIZERS_PARALLELISM=false
export OMP_WAIT_POLICY=passive  # threads outnumber cores: one that spins holds the others up
export PATH="$PWD/.venv/bin:$PATH"

failed=()
# ATEN_CPU_CAPABILITY chooses torch's own kernels; matrix products are MKL's, which asks otherwise.
for kernels in "default MKL_CBWR=COMPATIBLE" "avx2 MKL_ENABLE_INSTRUCTIONS=AVX2" "avx512 MKL_CBWR=AUTO"; do
    for threads in 1 2; do
        read -r capability mkl <<<"$kernels"
        echo "kernels: $capability, threads: $threads"
        env ATEN_CPU_CAPABILITY="$capability" "$mkl" OMP_NUM_THREADS="$threads" \
            python -m pytest -q -m "not slow and not gpu" "$@" || failed+=("$capability/$threads")
    done
done
echo "failed: ${failed[*]:-none}"
[ ${#failed[@]} -eq 0 ]
