"""Arguments of commands, tried before the work begins: numbers, devices that are there, files that can be written."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import torch

_SUFFIXES = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "B": 10**9}


def positive(text: str) -> int:
    """A whole number from 1 on, for argparse."""
    if not text.strip().isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"must be a whole number of at least 1, not {text!r}")
    return int(text)


def elements(text: str) -> int:
    """A number of elements, written out or with K, M, G or B, for argparse."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGB]?)", text.strip(), re.IGNORECASE)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of elements such as 400000000 or 400M")
    return int(float(match[1]) * _SUFFIXES[match[2].upper()])


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
