"""The parameters that a layout places, and their gradients, in flat buffers that move bucket by bucket."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fused_lw.layout import Layout

MAX_WAVES = 4  # enough to hide most of the traffic; more would cut same-shape batches into small ones

# torch 2.13 renamed them.
reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class FlatBuffers:
    """Parameters become views of one flat buffer, their gradients views of another, both as `layout` says.

    With `reduce` the gradients of a bucket are summed into its owners' shards (one reduce-scatter) as soon as the
    backward has written the last of them that the step before had, always in the order of the buckets. Where another
    one comes later, the bucket is reduced once more: the gradient buffer still holds what this rank has. Without
    `reduce`, somebody else has reduced the gradients and there is no buffer for them. `gather` sends the owners' new
    weights of a bucket to everyone.

    Gradients of bf16 and fp16 parameters are accumulated and reduced in fp32 (`Tensor.grad_dtype`).

    Args:
        layout: placements for exactly `params`.
        params: by name, of one dtype and on one device.
        group: `layout.dp_size` ranks that hold the same parameters.
        reduce: own the gradients and reduce them.
        divisor: turns a sum of gradients into their mean.
        overlap: reduce during the backward, and step in waves; otherwise everything moves in `finish` and after the
            last matrix.
    """

    def __init__(
        self,
        layout: Layout,
        params: Mapping[str, Tensor],
        group: dist.ProcessGroup,
        *,
        reduce: bool,
        divisor: int,
        overlap: bool,
    ) -> None:
        self.layout = layout
        self.names = [spec.name for spec in layout.params]
        self.params = [params[name] for name in self.names]
        self.group = group
        self.reduce = reduce
        self.syncing = True  # False inside no_sync()
        self.waves = _waves(layout, MAX_WAVES if overlap else 1)
        self._divisor = divisor
        self._overlap = overlap
        self._parts = layout.shard(dist.get_rank(group))
        self._members: list[list[int]] = [[] for _ in layout.buckets]
        for index, slot in enumerate(layout.slots):
            self._members[slot.bucket].append(index)

        like = self.params[0]
        self.flat = torch.zeros(layout.buffer_numel, dtype=like.dtype, device=like.device)
        strides = [torch.empty_like(param, device="meta").stride() for param in self.params]
        self._views = [self._view(self.flat, i, layout.slots[i].start, strides[i]) for i in range(len(self.params))]
        for param, view in zip(self.params, self._views, strict=True):
            view.copy_(param.detach())
            param.data = view
        # What this rank owns, as tensors with gradients of their own: the mean over the ranks.
        self.owned = {i: self._views[i].detach() for i in self._owned_indices()}

        self._gathering: list[Any] = []
        self._next = 0  # the first bucket whose reduction has not been started
        if not reduce:
            return
        dtype = torch.promote_types(like.dtype, torch.float32)
        self._grads = torch.zeros(layout.buffer_numel, dtype=dtype, device=like.device)
        self._grad_views = [self._view(self._grads, i, layout.slots[i].start, strides[i]) for i in range(len(strides))]
        self._reduced = torch.zeros(layout.buffer_numel // layout.dp_size, dtype=dtype, device=like.device)
        self._reduced_views = {}
        for i, owned in self.owned.items():
            part = self._parts[layout.slots[i].bucket]
            start = layout.buckets[part.bucket].start // layout.dp_size + layout.slots[i].start - part.start
            self._reduced_views[i] = self._view(self._reduced, i, start, strides[i])
            owned.grad_dtype = dtype
        self._touched = [False] * len(self.params)  # since zero_grad: has a gradient
        self._expected = [True] * len(self.params)  # had a gradient on some rank in the step before
        for index, (param, view) in enumerate(zip(self.params, self._grad_views, strict=True)):
            existing, param.grad = param.grad, None
            param.grad_dtype = dtype
            if existing is not None:
                view.copy_(existing)
                self._touched[index] = True
            param.grad = view
            # A hook must not keep the buffers of an optimizer alive that its user has dropped, nor outlive them.
            hook = functools.partial(_arrived, weakref.ref(self), index)
            handle = param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]
            weakref.finalize(self, handle.remove)
        self._restart()

    def replaced(self) -> list[bool]:
        """Which parameters no longer lie in the buffer."""
        return [p.data_ptr() != view.data_ptr() for p, view in zip(self.params, self._views, strict=True)]

    def broadcast(self) -> None:
        """Everyone takes the parameters of the group's first rank."""
        dist.broadcast(self.flat, src=dist.get_global_rank(self.group, 0), group=self.group)

    def finish(self) -> list[bool]:
        """Start the reductions that the backward could not start. Which parameters have a gradient on this rank.

        Without `reduce` every rank has the same gradients, and their owners speak for them.
        """
        if not self.reduce:
            return [i in self.owned and param.grad is not None for i, param in enumerate(self.params)]
        for index, slot in enumerate(self.layout.slots):
            grad = self.params[index].grad
            if slot.bucket < self._next and grad is not self._grad_views[index]:
                if grad is not None or self._touched[index]:
                    self._late.add(slot.bucket)
                self._collect(index)
        for bucket in range(self._next, len(self.layout.buckets)):
            for index in self._members[bucket]:
                self._collect(index)
            self._start_reduction(bucket)
        self._next = len(self.waves)
        self._begun = self._finished = True
        return list(self._touched)

    def late(self) -> list[bool]:
        """Which buckets got a gradient on this rank after their reduction had started."""
        return [bucket in self._late for bucket in range(len(self.waves))] if self.reduce else []

    def reduce_again(self, late: list[bool]) -> None:
        """Reduce the buckets once more that are late on any rank."""
        for bucket in itertools.compress(range(len(late)), late):
            self._reducing[bucket].wait()
            self._start_reduction(bucket)

    def give_gradients(self, touched: list[bool], factor: Tensor | None) -> None:
        """Give what this rank owns the mean gradient, times `factor`; None where no rank has one."""
        if self.reduce:
            self._expected = touched
            if factor is not None:
                self._reduced.mul_(factor)
        for index, owned in self.owned.items():
            if not touched[index]:
                owned.grad = None
            elif self.reduce:
                owned.grad = self._reduced_views[index]
            else:
                grad = self.params[index].grad
                assert grad is not None
                owned.grad = grad if factor is None else grad * factor

    def await_reduction(self, wave: int) -> None:
        """Wait until this rank's gradients of all buckets up to this wave are the mean over the ranks."""
        if not self.reduce:
            return
        for bucket, of_wave in enumerate(self.waves):
            work = self._reducing[bucket]
            if of_wave <= wave and work is not None:
                work.wait()
                self._reducing[bucket] = None
                self._reduced_part(bucket).div_(self._divisor)

    def gather(self, wave: int) -> None:
        """Start to send the buckets before this wave to everyone, those that are not on their way."""
        while len(self._gathering) < len(self.waves) and self.waves[len(self._gathering)] < wave:
            bucket, part = self.layout.buckets[len(self._gathering)], self._parts[len(self._gathering)]
            whole, mine = self.flat[bucket.start : bucket.end], self.flat[part.start : part.end]
            self._gathering.append(all_gather(whole, mine, group=self.group, async_op=True))

    def await_gathering(self) -> None:
        """Wait for all weights, and be ready for the next backward."""
        for work in self._gathering:
            work.wait()
        self._gathering = []
        for owned in self.owned.values():
            owned.grad = None
        if self.reduce:
            self._restart()

    def zero_grad(self, set_to_none: bool) -> None:
        """Zero the gradient buffer; with `set_to_none` its parameters also count as having no gradient."""
        if not self.reduce:
            return
        if self._begun:
            # A backward whose step was skipped: what the ranks have started they finish together.
            self.finish()
            self.await_reduction(max(self.waves))
            self._restart()
        self._grads.zero_()
        for index, (param, view) in enumerate(zip(self.params, self._grad_views, strict=True)):
            param.grad = view
            if set_to_none:
                self._touched[index] = False

    def _view(self, flat: Tensor, index: int, start: int, stride: tuple[int, ...]) -> Tensor:
        return flat.as_strided(self.layout.params[index].shape, stride, start)

    def _owned_indices(self) -> list[int]:
        position = {name: index for index, name in enumerate(self.names)}
        return [position[name] for part in self._parts for name in part.names]

    def _reduced_part(self, bucket: int) -> Tensor:
        start, end, _ = self.layout.buckets[bucket]
        return self._reduced[start // self.layout.dp_size : end // self.layout.dp_size]

    def _restart(self) -> None:
        self._next = 0
        self._begun = False  # whether some reduction may have started, here or elsewhere
        self._finished = False  # whether the mean that the step will take has been asked for
        self._missing = [{index for index in members if self._expected[index]} for members in self._members]
        self._late: set[int] = set()
        self._reducing: list[Any] = [None] * len(self.layout.buckets)

    def arrived(self, index: int) -> None:
        """The backward has written a gradient."""
        if self.params[index].data_ptr() != self._views[index].data_ptr():
            return  # it belongs to a newer optimizer's buffers
        if self._finished:
            raise RuntimeError(
                f"{self.names[index]} got a gradient after clip_grad_norm: step, or zero_grad, comes next"
            )
        self._collect(index)
        self._touched[index] = True
        bucket = self.layout.slots[index].bucket
        if bucket < self._next:
            self._late.add(bucket)
        if not self.syncing:
            return
        self._begun = True
        self._missing[bucket].discard(index)
        # In order, even where a later bucket is complete: collectives must start in one order on every rank.
        while self._overlap and self._next < len(self._missing) and not self._missing[self._next]:
            self._start_reduction(self._next)
            self._next += 1

    def _collect(self, index: int) -> None:
        """Bring a gradient into the buffer that somebody has set, or removed, behind its back."""
        param, view = self.params[index], self._grad_views[index]
        if param.grad is view:
            return
        self._touched[index] = param.grad is not None
        if param.grad is None:
            view.zero_()
        elif param.grad.data_ptr() != view.data_ptr():
            view.copy_(param.grad)
        param.grad = view

    def _start_reduction(self, bucket: int) -> None:
        start, end, _ = self.layout.buckets[bucket]
        self._reducing[bucket] = reduce_scatter(
            self._reduced_part(bucket), self._grads[start:end], group=self.group, async_op=True
        )


def _arrived(buffers: weakref.ref[FlatBuffers], index: int, _: Tensor) -> None:
    alive = buffers()
    if alive is not None:
        alive.arrived(index)


def _waves(layout: Layout, most: int) -> list[int]:
    """The wave of each bucket: neighbours, with about equal parts of the buffer."""
    middles = [(start + end) / 2 for start, end, _ in layout.buckets]
    parts = [int(most * middle / layout.buffer_numel) for middle in middles]
    number = {part: wave for wave, (part, _) in enumerate(itertools.groupby(parts))}
    return [number[part] for part in parts]
