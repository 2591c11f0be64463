"""LayerWiseMuon on real process groups of 1, 2, 4 and 8 gloo ranks."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.distributed import checkpoints, parallelism, refusals, scenarios, traffic
from tests.distributed.launch import errors, run_ranks
from tests.distributed.models import distances

# Starting processes takes longer than most scenarios, so eight of them run everything: they are the three smaller
# worlds at once, and then one world of eight. The ranks of a group are not those of the world, as in training that
# combines several kinds of parallelism.
SMALL_WORLDS = {1: [0], 2: [1, 2], 4: [3, 4, 5, 6]}
EVERY_WORLD = [*scenarios.EVERY_WORLD, *traffic.EVERY_WORLD]
WORLD_OF = {
    1: [],
    2: refusals.WORLD_OF_TWO,
    4: [*scenarios.WORLD_OF_FOUR, *traffic.WORLD_OF_FOUR, *parallelism.WORLD_OF_FOUR, *checkpoints.WORLD_OF_FOUR],
    8: [*scenarios.WORLD_OF_EIGHT, *traffic.WORLD_OF_EIGHT, checkpoints.resume, checkpoints.resume_sharded],
}
# Of what the world of four has saved
RESUMED = {1: [checkpoints.resume_alone], 2: [checkpoints.resume, checkpoints.resume_sharded], 4: []}


@pytest.mark.timeout(300)
def test_every_scenario_on_every_world(tmp_path):
    codes = run_ranks(every_scenario, 8, tmp_path, limit=240)
    assert codes == [0] * 8, errors(tmp_path)


def every_scenario(rank: int, world: int, folder: Path) -> None:
    groups = {size: dist.new_group(ranks) for size, ranks in SMALL_WORLDS.items()}
    for size, ranks in SMALL_WORLDS.items():
        if rank in ranks:
            run([*EVERY_WORLD, *WORLD_OF[size]], groups[size], folder)
    dist.barrier()
    for size, ranks in SMALL_WORLDS.items():
        if rank in ranks:
            run(RESUMED[size], groups[size], folder)
    run([*EVERY_WORLD, *WORLD_OF[8]], dist.group.WORLD, folder)


def run(chosen: list, group: dist.ProcessGroup, folder: Path) -> None:
    for scenario in chosen:
        started = time.monotonic()
        try:
            scenario(group, folder)
        except BaseException as error:
            raise RuntimeError(f"{scenario.__name__} on {group.size()} ranks") from error
        if group.rank() == 0:
            worst = ", largest relative difference {:.1e} ({})".format(*max(distances)) if distances else ""
            seconds = time.monotonic() - started
            print(f"{scenario.__name__} on {group.size()} ranks: {seconds:.1f} s{worst}", flush=True)
        distances.clear()
