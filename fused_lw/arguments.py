"""Arguments of commands, tried before the work begins: devices that are there and files that can be written."""

from __future__ import annotations

from pathlib import Path

import torch


def usable_device(name: str) -> torch.device:
    """The device of this name. Raises a ValueError with torch's reason if a tensor cannot live there."""
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(f"device {name!r} cannot be used: {reason}") from error
    return device


def check_writable(path: Path) -> None:
    """Raise an OSError, which names the path, if no file can be written there. Leaves what is there as it is."""
    there = path.exists()
    path.open("ab").close()
    if not there:
        path.unlink()
