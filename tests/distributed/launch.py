"""Spawn processes that form a gloo group and call a function together."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist


def run_ranks(
    function: Callable, world: int, folder: Path, *arguments, limit: float = 120, timeout: float = 40
) -> list:
    """Exit codes of `world` processes that call `function(rank, world, folder, *arguments)`.

    What a rank raises is written to folder/error.RANK. `timeout` is the process group's, `limit` that of everything;
    both in seconds.
    """
    context = multiprocessing.get_context("spawn")
    ranks = [
        context.Process(target=_work, args=(function, rank, world, folder, timeout, *arguments))
        for rank in range(world)
    ]
    for rank in ranks:
        rank.start()
    end = datetime.datetime.now() + datetime.timedelta(seconds=limit)
    for rank in ranks:
        rank.join(max(0.0, (end - datetime.datetime.now()).total_seconds()))
    codes = [rank.exitcode for rank in ranks]
    for rank in ranks:
        if rank.exitcode is None:
            rank.kill()
            rank.join()
    return codes


def errors(folder: Path) -> str:
    """The first two: the others follow from them."""
    paths = sorted(folder.glob("error.*"), key=lambda path: path.stat().st_mtime_ns)
    return "\n".join(f"{path.name}:\n{path.read_text()}" for path in paths[:2])


def _work(function: Callable, rank: int, world: int, folder: Path, timeout: float, *arguments) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world,
        timeout=datetime.timedelta(seconds=timeout),
    )
    try:
        function(rank, world, folder, *arguments)
    except BaseException:
        (folder / f"error.{rank}").write_text(traceback.format_exc())
        sys.stdout.flush()
        os._exit(1)  # at once, so that the others' collectives fail too
    dist.destroy_process_group()
