"""The examples, started by torchrun as their users do."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.timeout(240)
def test_the_three_examples_train_alike():
    losses = {name: losses_of(f"train_{name}.py") for name in ("layerwise", "ddp", "fsdp2")}
    for name, values in losses.items():
        assert len(values) == 2, "steps 1 and 10 are printed"
        assert values[1] < values[0] - 0.3, name
        # Three ways to compute the same steps, up to rounding
        assert values == pytest.approx(losses["layerwise"], abs=1e-3), name


def losses_of(example: str) -> list[float]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [*torchrun, str(ROOT / "examples" / example), "--steps=10", "--accumulate=2", "--width=48", "--layers=2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-4000:]
    return [float(loss) for loss in re.findall(r"loss (\S+)", done.stdout)]
