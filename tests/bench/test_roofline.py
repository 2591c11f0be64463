"""Peaks and floors."""

from __future__ import annotations

import pytest
import torch

from fused_lw.bench import roofline
from fused_lw.bench.shapes import Batch
from fused_lw.cli import main


@pytest.mark.parametrize(
    ("name", "device"),
    [
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA H200", "H200 SXM"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA GB300", "GB300"),
        ("AMD Instinct MI300X", "MI300X"),
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA A100-SXM4-80GB", None),
    ],
)
def test_a_device_gets_its_own_data_sheet_or_none(name, device):
    found = roofline.datasheet(name)
    assert (found and found.device) == device


def test_floors_are_the_slower_of_arithmetic_and_memory():
    batch = Batch(2, 1024, 4096)
    elements = 2 * 1024 * 4096
    for_arithmetic = roofline.floors(batch, roofline.Peak("", 1e12, 1e30, ""), "mixed")
    # Gram in fp16 restarts twice: of six n^2 s products half are symmetric; no algorithm needs less than 5 r^2 s.
    assert for_arithmetic["newton-schulz"] > 5 * 2 * 1024**2 * 4096 / 1e12
    assert for_arithmetic["newton-schulz"] < 2 * (15 * 1024**2 * 4096 + 5 * 1024**3) / 1e12
    assert for_arithmetic["copy-in"] == pytest.approx(0, abs=1e-15)
    for_memory = roofline.floors(batch, roofline.Peak("", 1e30, 1e9, ""), "mixed")
    assert for_memory["copy-in"] == pytest.approx(14 * elements / 1e9)
    assert for_memory["copy-out"] == pytest.approx(10 * elements / 1e9)
    # X is read for R and for QX, and written, at the very least.
    assert for_memory["newton-schulz"] > 3 * 2 * elements / 1e9


def test_measured_peak_of_a_cpu_is_plausible():
    found = roofline.measured(torch.device("cpu"))
    assert 1e9 < found.flops < 1e14
    assert 1e8 < found.bandwidth < 1e13
    assert "measured" in found.source


def test_the_command_prints_floors_by_data_sheet(capsys):
    assert main(["bench", "roofline", "--shapes", "4096x4096", "--of", "gb200"]) == 0
    assert "4096x4096*1" in capsys.readouterr().out
    assert main(["bench", "roofline", "--shapes", "4096x4096", "--of", "TPU"]) == 2
    assert "GB200" in capsys.readouterr().err
