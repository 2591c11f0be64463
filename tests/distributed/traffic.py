"""What moves between ranks in a step, and when."""

from __future__ import annotations

from collections import Counter

import torch
import torch.distributed as dist
from torch import nn

from fused_lw import LayerWiseMuon, buffers
from fused_lw.kernels import pack_reference
from fused_lw.layout import ParamSpec, model_specs, ns_cost, plan
from tests.distributed.models import EqualMatrices, ThreeMatrices, Tiny, batch, somewhere
from tests.distributed.scenarios import make

COLLECTIVES = [
    *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object", "all_gather_single"),
    *("all_reduce", "all_reduce_coalesced", "all_to_all", "all_to_all_single", "barrier", "broadcast"),
    *("broadcast_object_list", "gather", "reduce", "reduce_scatter", "reduce_scatter_single"),
    *("reduce_scatter_tensor", "scatter", "send", "recv", "isend", "irecv", "batch_isend_irecv"),
]


class Recorded:
    """The names of collectives with the elements they take, and whatever else is noted, in order of time."""

    def __init__(self, of_pack=lambda args: 0) -> None:
        self._of_pack = of_pack
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
        self.wrap(pack_reference, "copy_in", "newton-schulz", self._of_pack)
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
    flags = 2 * len(list(model.parameters())) + len(layout.buckets)  # has a gradient, was replaced; is late
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


def late_gradients_are_reduced_again(group, folder):
    """Of a matrix that the step before did not use, and whose gradient is the last to come."""
    model = ThreeMatrices()
    optimizer = make(model, group, layout="auto")
    reductions = []
    for used in (False, True, True):
        optimizer.zero_grad()
        with Recorded() as recorded:
            model(batch(group.rank(), 0, 0), used and group.rank() == 0).backward()
            optimizer.step()
        reductions.append([name for name, _ in recorded.events].count("reduce-scatter"))
    assert reductions == [1, 2, 1]


def newton_schulz_work_is_what_the_layout_promised(group, folder):
    """nemotron-3-nano with every dimension a sixteenth, but all of its 5,992 matrices."""
    specs = [
        ParamSpec(spec.name, (*spec.shape[:-2], *(size // 16 for size in spec.shape[-2:])))
        for spec in model_specs("nemotron-3-nano")
    ]
    layout = plan(specs, dp_size=group.size(), bucket_size=4_000_000)
    params = [(spec.name, nn.Parameter(torch.ones(spec.shape, dtype=torch.bfloat16))) for spec in specs]
    # Without reduction only owners need gradients: eight ranks' would not fit into a small machine.
    optimizer = LayerWiseMuon(params, layout, group, reduce="ddp", ns_steps=1, lr=0.5, weight_decay=1.0)
    for name, param in params:
        if layout.placements[name].shard == group.rank():
            param.grad = torch.ones_like(param)
    work = []

    def of_pack(args) -> int:
        batches = [group.workspace.shape for group in args[0].groups]
        work.append(sum(count * ns_cost(ParamSpec("one", (r, s))) for count, r, s in batches))
        return 0

    with Recorded(of_pack):
        optimizer.step()
    works = [None] * group.size()
    dist.all_gather_object(works, sum(work), group=group)
    held = sum(entry["momentum_buffer"].numel() for entry in optimizer.state.values())
    assert abs(held * group.size() / layout.numel - 1) < 0.05, "an even part of the momenta"
    measured = max(works) * group.size() / sum(works)
    assert abs(measured / layout.imbalance - 1) < 0.05
    assert not (optimizer._replicas[0].matrices.buffers.flat == 1).any(), (
        "every matrix was stepped by its owner and came back"
    )
    if group.rank() == 0:
        print(f"Newton-Schulz work, maximum over mean: {measured:.5f}, the layout promised {layout.imbalance:.5f}")


EVERY_WORLD = [one_reduce_scatter_and_one_all_gather_per_bucket]
WORLD_OF_FOUR = [late_gradients_are_reduced_again, communication_overlaps_backward_and_step]
WORLD_OF_EIGHT = [newton_schulz_work_is_what_the_layout_promised]
