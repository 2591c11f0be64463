"""What moves between ranks in a step, and when."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist

from fused_lw import buffers
from fused_lw.kernels import pack_reference
from tests.distributed.models import EqualMatrices, Tiny, batch, somewhere
from tests.distributed.scenarios import make

COLLECTIVES = [
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single"),
    *("all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "broadcast"),
    *("broadcast_object_list", "gather", "reduce", "reduce_scatter", "reduce_scatter_single"),
    *("reduce_scatter_tensor", "scatter", "send", "recv", "isend", "irecv", "batch_isend_irecv"),
]


class Recorded:
    """The names of collectives with the elements they take, and whatever else is noted, in order of time."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self._undo: list[tuple[object, str, object]] = []

    def wrap(self, owner: object, name: str, event: str, numel) -> None:
        function = getattr(owner, name)
        self._undo.append((owner, name, function))

        def recorded(*args, **kwargs):
            self.events.append((event, numel(args)))
            return function(*args, **kwargs)

        setattr(owner, name, recorded)

    def __enter__(self) -> Recorded:
        for name in COLLECTIVES:
            if hasattr(dist, name):
                self.wrap(dist, name, name, lambda args: args[0].numel() if torch.is_tensor(args[0]) else 0)
        self.wrap(buffers, "reduce_scatter", "reduce-scatter", lambda args: args[1].numel())
        self.wrap(buffers, "all_gather", "all-gather", lambda args: args[0].numel())
        self.wrap(pack_reference, "copy_in", "newton-schulz", lambda args: 0)
        return self

    def __exit__(self, *_) -> None:
        for owner, name, function in self._undo:
            setattr(owner, name, function)


def one_reduce_scatter_and_one_all_gather_per_bucket(group, folder):
    model = Tiny()
    optimizer = make(model, group)
    layout = optimizer._replicas[0].matrices.buffers.layout
    with Recorded() as recorded:
        model(batch(group.rank(), 0, 0), somewhere(group.rank(), 0, 0)).backward()
        optimizer.step()
    moved = Counter(recorded.events)
    del moved["newton-schulz", 0]
    others = sum(p.numel() for p in model.parameters()) - layout.numel
    flags = 2 * len(list(model.parameters()))  # has a gradient, was replaced
    expected = Counter({("all_reduce", others + flags): 1})
    for bucket in layout.buckets:
        expected["reduce-scatter", bucket.end - bucket.start] += 1
        expected["all-gather", bucket.end - bucket.start] += 1
    assert len(layout.buckets) > 1 or group.size() > 2
    assert moved == expected


def communication_overlaps_backward_and_step(group, folder):
    model = EqualMatrices()
    optimizer = make(model, group)
    with Recorded() as recorded:
        model(torch.ones(4, 16)).backward()
        recorded.events.append(("backward ends", 0))
        optimizer.step()
    names = [name for name, _ in recorded.events]
    assert names.index("reduce-scatter") < names.index("backward ends")
    last_newton_schulz = len(names) - 1 - names[::-1].index("newton-schulz")
    assert names.index("all-gather") < last_newton_schulz


EVERY_WORLD = [one_reduce_scatter_and_one_all_gather_per_bucket]
WORLD_OF_FOUR = [communication_overlaps_backward_and_step]
