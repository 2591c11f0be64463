#!/usr/bin/env bash
# One CUDA GPU, under 4 minutes: the kernels' tests on it, Newton-Schulz of 12 shapes against the peers (cuBLAS among
# them), the copies, whole steps of two models, and a profile. PYTHON names the interpreter.
# Writes bench/results/device-<gpu>-<date>.jsonl.
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
name=$(echo "$gpu" | tr ' A-Z' '-a-z')-$(date +%F)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
failed=0

# A part that fails or takes too long does not keep the others from being measured, but the check fails.
part() {
    local seconds=$1
    shift
    echo "== $*" >&2
    timeout "$seconds" "$@" || { echo "device_check: failed or over $seconds s: $*" >&2; failed=1; }
}
bench() {
    local seconds=$1
    shift
    part "$seconds" "$python" -m fused_lw.cli bench "$@" --device cuda --json "$work/rows.jsonl"
}

part 60 "$python" -m pytest -q -p no:cacheprovider tests/kernels/test_newton_schulz.py tests/kernels/test_pack.py

# Small, odd, square, wide; experts; dense matrices of 8B, 70B and hybrid models.
shapes=64x2048*64,102x767*32,512x8192*2,768x768*12,768x3072*24,1024x4096*8
shapes=$shapes,1856x2688*8,2048x5120*8,2688x4096*4,4096x4096*4,4096x14336*2,8192x8192*1
providers=(fused_lw "fused_lw fp16" "fused_lw standard" "fused_lw gram" "torch baddbmm bf16" torch.optim.Muon
    gram-newton-schulz Emerging-Optimizers Dion)
bench 60 ns --shapes "$shapes" --providers "${providers[@]}" --rounds 15
bench 12 pack --shapes 768x3072*24,1856x2688*64,4096x14336*8
step=(--providers fused_lw "torch batched bf16" torch.optim.Muon --rounds 9)
bench 15 step --model gpt2-124m "${step[@]}"
bench 20 step --model llama3-8b --first 28 "${step[@]}"

tool=torch
if command -v nsys > /dev/null; then tool=nsys; fi
part 30 "$python" -m fused_lw.cli profile --tool "$tool" --bench step --model gpt2-124m --device cuda \
    --out "$work/profile" --json "$work/rows.jsonl"

[ -s "$work/rows.jsonl" ] && cp "$work/rows.jsonl" "bench/results/device-$name.jsonl"
ls -l bench/results/*"$name"*
exit $failed
