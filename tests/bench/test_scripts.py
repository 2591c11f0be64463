"""The scripts in bench/: they parse, name commands that exist, and say what they need."""

from __future__ import annotations

import argparse
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import torch

from fused_lw import cli_bench
from fused_lw.cli_bench import BENCHMARKS

BENCH = Path(__file__).parents[2] / "bench"
SCRIPTS = sorted(BENCH.glob("*.sh"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.name)
def test_scripts_are_valid_and_run_benchmarks_that_exist(script):
    subprocess.run(["bash", "-n", script], check=True)
    names = re.findall(r"^bench (?:\d+ )?(\w+)", script.read_text(), re.MULTILINE)
    assert len(names) >= 4
    assert set(names) <= set(BENCHMARKS)


def test_cpu_results_calls_the_benchmarks_as_they_are():
    parser = argparse.ArgumentParser()
    cli_bench.add_arguments(parser)
    text = (BENCH / "cpu_results.sh").read_text().replace("\\\n", " ")
    calls = [shlex.split(line)[1:] for line in text.splitlines() if re.match(r"bench \w", line)]
    assert {call[0] for call in calls} == {"ns", "pack", "step", "layout"}
    for call in calls:
        parser.parse_args(call)


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here: the check would run")
def test_device_check_without_a_gpu_says_so():
    done = subprocess.run(["bash", BENCH / "device_check.sh"], capture_output=True, text=True)
    assert done.returncode == 1
    assert "needs a CUDA GPU" in done.stderr
