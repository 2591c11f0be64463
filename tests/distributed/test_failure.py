"""A rank that dies in the middle of a step."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch.distributed as dist

from fused_lw import buffers
from tests.distributed.checkpoints import STEPS, alone, load, save, spoiled, steps, uninterrupted
from tests.distributed.launch import run_ranks
from tests.distributed.models import ThreeMatrices, assert_same
from tests.distributed.scenarios import make

TIMEOUT = 20  # seconds, the process group's


def test_a_killed_rank_stops_the_others_and_the_checkpoint_loads(tmp_path):
    codes = run_ranks(train_until_killed, 3, tmp_path, timeout=TIMEOUT, limit=60)
    assert codes == [1, -signal.SIGKILL, 1]
    for rank in (0, 2):
        seconds = float((tmp_path / f"stopped.{rank}").read_text())
        assert seconds < TIMEOUT
        assert "RuntimeError" in (tmp_path / f"error.{rank}").read_text()
    model = spoiled(ThreeMatrices())
    optimizer = alone(model)
    load(model, optimizer, tmp_path / "checkpoint")
    steps(model, optimizer, STEPS)
    assert_same(model, uninterrupted(ThreeMatrices))


def train_until_killed(rank: int, world: int, folder: Path) -> None:
    model = ThreeMatrices()
    optimizer = make(model, dist.group.WORLD)
    # The batch of eight is not divisible by three: every rank computes all of it.
    steps(model, optimizer, 0)
    save(model, optimizer, folder / "checkpoint", dist.group.WORLD)
    if rank == 1:
        buffers.all_gather = lambda *args, **kwargs: os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    try:
        steps(model, optimizer, STEPS)
    finally:
        (folder / f"stopped.{rank}").write_text(str(time.monotonic() - started))
