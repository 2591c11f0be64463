#!/usr/bin/env bash
# The kernels' tests on one CUDA GPU, then the kernels against cuBLAS: under 4 minutes in all.
# Writes bench/results/products-<gpu>-<date>.csv and prints it. PYTHON names the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}

gpu=$("$python" -c 'import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else "")')
if [ -z "$gpu" ]; then
    echo "device_check needs a CUDA GPU, and torch sees none" >&2
    exit 1
fi
unset TRITON_INTERPRET
echo "$gpu, $(date +%F)"

timeout 120 "$python" -m pytest -q -p no:cacheprovider tests/kernels/test_newton_schulz.py tests/kernels/test_pack.py

result="bench/results/products-$(echo "$gpu" | tr ' A-Z' '-a-z')-$(date +%F).csv"
timeout 90 "$python" bench/products.py > "$result.part"
mv "$result.part" "$result"
cat "$result"
