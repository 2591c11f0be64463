#!/usr/bin/env bash
# Regenerates bench/results/cpu.jsonl, cpu.md and the pictures in cpu/: everything that runs on a CPU, about 25 minutes
# on two cores. Run it on a quiet machine. PYTHON names the interpreter.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-.venv/bin/python}
results=$PWD/bench/results
rows=$(mktemp)
trap 'rm -f "$rows"' EXIT
export CUDA_VISIBLE_DEVICES= # or the benchmarks would take a GPU that is here

bench() {
    echo "== fused-lw bench $*"
    # A peer that is slower, or even one that is wrong, is a result; only bad usage ends the run.
    "$python" -m fused_lw.cli bench "$@" --json "$rows" || [ $? -eq 1 ]
}

bench ns --model gpt2-124m --max-batch 1 --rounds 9
bench ns --model gpt2-124m --scale-down 8 --rounds 25
bench ns --model nemotron-3-nano --scale-down 4 --max-batch 4 --rounds 15
bench pack --model gpt2-124m --max-batch 8
bench step --model gpt2-124m --rounds 5
bench step --model gpt2-124m --scale-down 8 --rounds 41
bench step --model qwen3-8b --scale-down 8 --rounds 3
# One layer at a quarter of its size, as a CPU without bf16 instructions steps it.
export ONEDNN_MAX_CPU_ISA=AVX2
bench step --model gpt2-124m --first 4 --scale-down 4 --rounds 15 --providers fused_lw "float32 loop" torch.optim.Muon
unset ONEDNN_MAX_CPU_ISA
bench layout --model gpt2-124m --dp 8
bench layout --model qwen3-30b-a3b --dp 64 --ep 8

mv "$rows" "$results/cpu.jsonl"
chmod 644 "$results/cpu.jsonl"
"$python" -m fused_lw.cli bench report "$results/cpu.jsonl" --markdown "$results/cpu.md" --plots "$results/cpu"
