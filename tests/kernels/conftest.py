"""The torch backend rounds as a GPU does in these tests, whatever CPU they run on."""

import importlib

import pytest

# By name: the package's attribute `newton_schulz` is the function.
MODULES = [importlib.import_module(f"fused_lw.kernels.{name}") for name in ("newton_schulz", "reference")]


@pytest.fixture(autouse=True)
def bf16_units(monkeypatch):
    """A function that says whether the CPU has bf16 units; until it is called, it has none."""

    def choose(present: bool) -> None:
        for module in MODULES:
            monkeypatch.setattr(module, "cpu_has_bf16_units", lambda: present)

    choose(False)
    return choose
