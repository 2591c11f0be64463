"""What the ranks of a group must have in common, compared before they depend on it."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

import torch.distributed as dist


def agree(
    group: dist.ProcessGroup,
    facts: Mapping[str, object],  # what -> value; equal values print alike
    error: Exception | None = None,
) -> None:
    """Return on every rank of the group, or raise on every rank: never leave some waiting for the others.

    Args:
        group: all of its ranks call this together.
        facts: must be equal on all ranks.
        error: what this rank refuses on its own, such as a bad argument.

    Raises:
        ValueError: on every rank, with the first rank's error (the rank itself raises its own), or with the first
            fact that differs and its two values.
    """
    text = {what: repr(value) for what, value in facts.items()}
    summary = hashlib.sha256(repr(text).encode()).hexdigest()
    told: list[tuple[str | None, str]] = _exchange(group, (None if error is None else str(error), summary))
    if error is not None:
        raise error
    for rank, (message, _) in enumerate(told):
        if message is not None:
            raise ValueError(f"rank {dist.get_global_rank(group, rank)}: {message}")
    if all(other == summary for _, other in told):
        return
    # Only now: descriptions of large models are long.
    everything: list[dict[str, str]] = _exchange(group, text)
    first = everything[0]
    for rank, other in enumerate(everything):
        for what in [*first, *other]:
            if first.get(what) != other.get(what):
                ranks = [dist.get_global_rank(group, member) for member in (0, rank)]
                raise ValueError(
                    f"ranks {ranks[0]} and {ranks[1]} differ in {what}: "
                    f"{first.get(what, 'absent')} and {other.get(what, 'absent')}"
                )


def _exchange(group: dist.ProcessGroup, mine: Any) -> list[Any]:
    told = [None] * dist.get_world_size(group)
    dist.all_gather_object(told, mine, group=group)
    return told
