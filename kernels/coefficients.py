"""Newton-Schulz schedules by name: one triple (a, b, c) per step, X <- aX + (bA + cA^2)X with A = XX^T."""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Sequence
from importlib import resources
from numbers import Real
from typing import Any, cast

Triple = tuple[float, float, float]
Coefficients = str | Triple | Sequence[Sequence[float]]


@functools.cache
def _table() -> dict[str, dict[str, Any]]:
    text = resources.files(__package__).joinpath("coefficients.json").read_text(encoding="utf-8")
    return cast(dict[str, dict[str, Any]], json.loads(text)["schedules"])


def names() -> tuple[str, ...]:
    """The names that `schedule` knows."""
    return tuple(_table())


def _entry(name: str) -> dict[str, Any]:
    table = _table()
    if name not in table:
        hint = ""
        if name == "polar_express":
            # Libraries that call theirs "polar_express" scale it differently, so the bare name says too little.
            variants = ", ".join(known for known in table if known.startswith("polar_express_"))
            hint = f"; 'polar_express' has several scalings, name one: {variants}"
        raise ValueError(f"unknown coefficients {name!r}; known names: {', '.join(table)}{hint}")
    return table[name]


def norm_factor(coefficients: Coefficients) -> float:
    """What the schedule's authors multiply the Frobenius norm by before dividing by it; 1 unless they say so."""
    return float(_entry(coefficients).get("norm_factor", 1.0)) if isinstance(coefficients, str) else 1.0


def schedule(coefficients: Coefficients, steps: int) -> tuple[Triple, ...]:
    """Expand coefficients to one (a, b, c) per step.

    Args:
        coefficients: a name of `names()`; or one triple, used in every step; or exactly `steps` triples.
        steps: number of Newton-Schulz steps, at least 1.

    A named schedule shorter than `steps` cycles or repeats its last triple, as its authors do (or refuses).

    Raises:
        ValueError: an unknown name, steps < 1, not three finite numbers, or too many or too few triples.
        TypeError: steps is not an integer, or a coefficient is not a number.
    """
    if isinstance(steps, bool) or not isinstance(steps, int):
        raise TypeError(f"steps must be an integer; got {steps!r}")
    if steps < 1:
        raise ValueError(f"steps must be at least 1; got {steps}")
    if isinstance(coefficients, str):
        return _named(coefficients, steps)
    given = list(coefficients)
    if not given:
        raise ValueError("coefficients are empty: expected a name, one (a, b, c), or one (a, b, c) per step")
    if isinstance(given[0], Real):
        return (_triple(given, "coefficients"),) * steps
    triples = tuple(_triple(item, f"coefficients[{i}]") for i, item in enumerate(given))
    if len(triples) != steps:
        raise ValueError(f"coefficients hold {len(triples)} triples for steps={steps}: give one triple per step")
    return triples


def _named(name: str, steps: int) -> tuple[Triple, ...]:
    entry = _entry(name)
    if "scaled_from" in entry:
        raw = _entry(entry["scaled_from"])["steps"]
        triples = [(a / s, b / s**3, c / s**5) for (a, b, c), s in zip(raw, entry["safety"], strict=True)]
    else:
        triples = [(a, b, c) for a, b, c in entry["steps"]]
    if steps > len(triples):
        if entry["after_last"] == "error":
            raise ValueError(f"coefficients {name!r} are defined for {len(triples)} steps; got steps={steps}")
        if entry["after_last"] == "repeat_last":
            triples += [triples[-1]] * (steps - len(triples))
    return tuple(triples[i % len(triples)] for i in range(steps))


def _triple(item: Any, where: str) -> Triple:
    if isinstance(item, str) or not isinstance(item, Sequence):
        raise TypeError(f"{where} must be three numbers (a, b, c); got {item!r}")
    if len(item) != 3:
        raise ValueError(f"{where} must be three numbers (a, b, c); got {len(item)}: {item!r}")
    for value in item:
        if isinstance(value, bool) or not isinstance(value, Real):
            raise TypeError(f"{where} must be three numbers (a, b, c); got {item!r}")
        if not math.isfinite(value):
            raise ValueError(f"{where} must be finite; got {item!r}")
    return (float(item[0]), float(item[1]), float(item[2]))
