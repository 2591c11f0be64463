#!/usr/bin/env bash
# Regenerates bench/results/cpu_steps.jsonl, the two whole steps that the README quotes: about 3 minutes on two cores.
# Run it on a quiet machine. PYTHON names the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
rows=bench/results/cpu_steps.jsonl
rm -f "$rows"

bench() {
    "$python" -m fused_lw.cli bench "$@" --json "$rows"
}

bench step --model gpt2-124m --rounds 5 --providers fused_lw "float32 loop"
# One layer, as a CPU without bf16 instructions steps it.
export ONEDNN_MAX_CPU_ISA=AVX2
bench step --model gpt2-124m --first 4 --scale-down 4 --rounds 15 --providers fused_lw "float32 loop" torch.optim.Muon
