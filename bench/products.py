"""The kernels against cuBLAS (`torch.baddbmm`, batched) on one GPU: medians, cold L2, interleaved, as CSV.

python -m fused_lw.bench.products > bench/results/products-<gpu>-<date>.csv
"""

from __future__ import annotations

import csv
import datetime
import functools
import sys
from collections.abc import Callable

import torch

from fused_lw.kernels import newton_schulz
from fused_lw.kernels.products import General, Product, Symmetric
from fused_lw.kernels.triton_backend import describe, run_launches
from fused_lw.kernels.tuning import interleaved_milliseconds

# (B, r, s): experts and dense matrices of the models in layout/models.json.
SHAPES = ((8, 768, 2048), (8, 1856, 2688), (4, 2688, 4096), (1, 4096, 4096), (1, 4096, 14336), (64, 64, 2048))
ROUNDS = 15


def cublas_newton_schulz(X: torch.Tensor) -> torch.Tensor:
    """torch.optim.Muon's iteration, batched: bf16, three products a step."""
    X = X.bfloat16()
    X = X / torch.linalg.matrix_norm(X, keepdim=True).clamp_min(1e-7)
    for _ in range(5):
        A = X @ X.mT
        B = torch.baddbmm(A, A, A, beta=-4.775, alpha=2.0315)
        X = torch.baddbmm(X, B, X, beta=3.4445)
    return X


def main() -> None:
    device = torch.device("cuda")
    writer = csv.writer(sys.stdout, lineterminator="\n")
    writer.writerow(["gpu", "torch", "date", "operation", "batch", "r", "s", "ours_ms", "cublas_ms"])
    about = [torch.cuda.get_device_name(), torch.__version__, datetime.date.today().isoformat()]
    for batch, r, s in SHAPES:
        X = torch.randn(batch, r, s, device=device, dtype=torch.float16)
        A = X @ X.mT / s
        square, wide = torch.empty_like(A), torch.empty_like(X)
        products: dict[str, tuple[Product, Callable[[], object]]] = {
            "XX^T": (Symmetric(X, X, square), functools.partial(torch.matmul, X, X.mT)),
            "bA+cA^2": (
                Symmetric(A, A, square, alpha=2.0, beta=-4.0),
                functools.partial(torch.baddbmm, A, A, A, beta=-4.0, alpha=2.0),
            ),
            "aX+BX": (General(A, X, wide, beta=3.0), functools.partial(torch.baddbmm, X, A, X, beta=3.0)),
        }
        rows: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {}
        for name, (product, cublas) in products.items():
            launches = describe([[(product,)]])
            rows[name] = (functools.partial(run_launches, launches), cublas)
        rows["newton_schulz"] = (functools.partial(newton_schulz, X), functools.partial(cublas_newton_schulz, X))
        times = interleaved_milliseconds([f for pair in rows.values() for f in pair], device, ROUNDS)
        for i, name in enumerate(rows):
            writer.writerow([*about, name, batch, r, s, f"{times[2 * i]:.4f}", f"{times[2 * i + 1]:.4f}"])
            sys.stdout.flush()


if __name__ == "__main__":
    main()
