"""The one door through which every Triton kernel is launched, so that launches can be counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_open_counters: list[Counter[str]] = []


def launch(kernel: Any, grid: tuple[int, ...], *args: Any, **kwargs: Any) -> None:
    """Run `kernel[grid](*args, **kwargs)` and count it. An empty grid is a caller's mistake, not a no-op."""
    for counter in _open_counters:
        counter[kernel.__name__] += 1
    kernel[grid](*args, **kwargs)


@contextmanager
def count_launches() -> Iterator[Counter[str]]:
    """Count the launches made inside the block: `with count_launches() as n: ...` leaves kernel name -> launches.

    Blocks nest: each sees every launch made while it is open. Not meant for several threads at once.
    """
    counter: Counter[str] = Counter()
    _open_counters.append(counter)
    try:
        yield counter
    finally:
        # By identity: two open counters with equal counts compare equal.
        _open_counters[:] = [c for c in _open_counters if c is not counter]
