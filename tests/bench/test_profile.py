"""Ranges, `fused-lw profile`, and what it reads from Nsight Systems and from torch.profiler."""

from __future__ import annotations

import json
import random
import sys
import time
from pathlib import Path

import pytest

from fused_lw import cli_profile, nvtx
from fused_lw.bench import nsys, stages, trace
from fused_lw.cli import main

WHOLE = ["copy-in", "newton-schulz", "copy-out", "gaps", "step", "reduce-scatter", "all-reduce", "all-gather"]

# What `nsys stats --format csv` prints, written from its documented columns. 2024: nanoseconds, with a note before the
# table. 2025: other columns in another order, other units, thousands separated, and a note about the next report.
PRINTED = {
    version: {
        report: (Path(__file__).parent / "nsys" / f"{version}_{report}.csv").read_text() for report in nsys.REPORTS
    }
    for version in ("2024", "2025")
}
RANGES_2024 = PRINTED["2024"]["nvtx_gpu_proj_sum"]
# Milliseconds a step: a fifth of what five steps took.
EXPECTED = {
    "copy-in": 1.0,
    "newton-schulz": 6.0,
    "newton-schulz/symmetric products": 4.0,
    "newton-schulz/general products": 1.9,
    "copy-out": 0.5,
    "gaps": 0.5,
    "step": 8.0,
    "reduce-scatter": 0.8,
    "all-reduce": 0.0,
    "all-gather": 0.6,
}


@pytest.mark.parametrize("version", PRINTED)
def test_both_forms_of_the_reports_give_the_same_stages(version):
    profile = nsys.profile(3, PRINTED[version], "rank3.nsys-rep")
    assert (profile.rank, profile.steps) == (3, 5)
    assert profile.stages == pytest.approx(EXPECTED)
    assert list(profile.stages) == list(EXPECTED)


@pytest.mark.parametrize("version", PRINTED)
def test_rows_may_come_in_any_order(version):
    def shuffled(text):
        lines = text.splitlines()
        start = next(i for i, line in enumerate(lines) if "Instances" in line) + 1
        end = next((i for i in range(start, len(lines)) if not lines[i]), len(lines))
        rows = lines[start:end]
        random.Random(1).shuffle(rows)
        return "\n".join([*lines[:start], *rows, *lines[end:]])

    texts = {report: shuffled(text) for report, text in PRINTED[version].items()}
    assert nsys.profile(0, texts, "x").stages == pytest.approx(EXPECTED)


@pytest.mark.parametrize("report", nsys.REPORTS)
@pytest.mark.parametrize("text", ["", "SKIPPED: rank0.sqlite does not contain NV Tools Extension (NVTX) data.\n"])
def test_a_missing_report_is_an_error_that_says_how_to_get_it(report, text):
    with pytest.raises(ValueError, match="nsys stats --report " + report) as caught:
        nsys.profile(0, PRINTED["2024"] | {report: text}, "rank0.nsys-rep")
    assert "-t cuda,nvtx" in str(caught.value)
    assert (text.strip() or "no table") in str(caught.value)


def test_a_recording_without_our_ranges_is_an_error():
    texts = PRINTED["2024"] | {"nvtx_gpu_proj_sum": RANGES_2024.replace("fused_lw/step", "train/step")}
    with pytest.raises(ValueError, match="fused_lw/step"):
        nsys.profile(0, texts, "x")


@pytest.mark.parametrize(("old", "new"), [("(ns)", "(fortnights)"), ("40000000,52", "many,52")])
def test_an_unknown_unit_or_number_is_an_error_that_shows_it(old, new):
    with pytest.raises(ValueError, match=new.strip("()").split(",")[0]):
        nsys.profile(0, PRINTED["2024"] | {"nvtx_gpu_proj_sum": RANGES_2024.replace(old, new)}, "x")


def test_the_table_names_the_slowest_rank():
    slow = nsys.profile(1, PRINTED["2024"], "x")
    fast = slow._replace(rank=0, stages={stage: value / 2 for stage, value in slow.stages.items()})
    table = stages.table([slow, fast])
    assert [column.header for column in table.columns] == [
        "stage",
        "rank 0",
        "rank 1",
        "slowest: rank 1",
        "of its step",
    ]
    cells = list(zip(*(column.cells for column in table.columns), strict=True))
    assert ("newton-schulz", "3.000", "6.000", "6.000", "75%") in cells


def test_one_recording_per_rank_under_torchrun_and_slurm():
    def output(environment):
        command = nsys.record_command("nsys", Path("out"), nsys.rank_variable(environment), ["python", "train.py"])
        assert command[-2:] == ["python", "train.py"]
        return command[command.index("-o") + 1]

    assert output({"RANK": "3", "SLURM_PROCID": "0"}) == "out/rank%q{RANK}"
    assert output({"SLURM_PROCID": "3"}) == "out/rank%q{SLURM_PROCID}"
    assert output({}) == "out/rank0"


TRAIN = """
import torch, fused_lw
torch.set_num_threads(1)
params = [torch.nn.Parameter(torch.ones(shape)) for shape in ((96, 64), (64, 96), (64, 64))]
optimizer = fused_lw.Muon(params)
for _ in range(6):
    for param in params:
        param.grad = torch.randn_like(param)
    optimizer.step()
"""


@pytest.fixture
def train(tmp_path) -> list[str]:
    (tmp_path / "train.py").write_text(TRAIN)
    return [sys.executable, str(tmp_path / "train.py")]


def test_torch_profiler_gives_the_same_table_on_a_cpu(train, tmp_path, capsys):
    out, file = tmp_path / "out", tmp_path / "rows.jsonl"
    options = ["--tool", "torch", "--first", "3", "--steps", "2", "--out", str(out), "--json", str(file)]
    assert main(["profile", *options, "--", *train]) == 0
    (profile,) = trace.read(out)
    assert profile.steps == 2
    assert [stage for stage in profile.stages if "/" not in stage] == WHOLE
    times = profile.stages
    assert all(times[stage] > 0 for stage in ("copy-in", "newton-schulz", "copy-out", "gaps"))
    assert sum(times[stage] for stage in ("copy-in", "newton-schulz", "copy-out", "gaps")) == pytest.approx(
        times["step"]
    )
    parts = {stage: value for stage, value in times.items() if stage.startswith("newton-schulz/")}
    assert "newton-schulz/aten::baddbmm" in parts
    assert sum(parts.values()) <= times["newton-schulz"]
    printed = capsys.readouterr().out
    assert all(stage in printed for stage in WHOLE)
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert {row["stage"]: row["p50_ms"] for row in rows} == pytest.approx(times)
    assert main(["bench", "report", str(file), "--plots", str(tmp_path / "plots")]) == 0


def test_ranks_leave_their_traces_and_the_table_is_made_afterwards(train, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    for rank in ("0", "1"):
        monkeypatch.setenv("RANK", rank)
        # The run ends before the last step asked for: what was recorded is kept.
        assert main(["profile", "--tool", "torch", "--steps", "50", "--out", str(out), "--", *train]) == 0
    monkeypatch.delenv("RANK")
    assert "--table" in capsys.readouterr().out
    assert main(["profile", "--table", str(out)]) == 0
    assert "mean of 4 steps, 2 ranks" in capsys.readouterr().out


def test_a_gpu_s_trace_is_read_from_its_own_times():
    def event(cat, name, ts, dur):
        return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "tid": 1}

    host = [event("user_annotation", "fused_lw/step", 0, 50), event("user_annotation", "fused_lw/ns/gram", 10, 5)]
    device = [
        event("gpu_user_annotation", "fused_lw/step", 100, 8000),
        event("gpu_user_annotation", "fused_lw/pack", 100, 1000),
        event("gpu_user_annotation", "fused_lw/ns/gram", 1200, 6500),
        event("kernel", "symmetric_kernel", 1200, 4000),
        event("kernel", "update_kernel", 5200, 2000),
        event("kernel", "ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgs)", 8100, 600),
        event("cpu_op", "aten::mm", 11, 2),
    ]
    profile = trace.profile(0, {"traceEvents": [*host, *device, {"ph": "M", "name": "thread_name"}]}, "x")
    assert profile.stages == pytest.approx(
        {
            "copy-in": 1.0,
            "newton-schulz": 6.5,
            "newton-schulz/symmetric products": 4.0,
            "newton-schulz/last product with copy-out": 2.0,
            "copy-out": 0.0,
            "gaps": 0.5,
            "step": 8.0,
            "reduce-scatter": 0.0,
            "all-reduce": 0.0,
            "all-gather": 0.6,
        }
    )


FAKE_NSYS = """#!/bin/sh
if [ "$1" = profile ]; then
    for word in "$@"; do [ "$last" = -o ] && out=$word; last=$word; done
    echo recorded > "$out.nsys-rep"
else
    cat "$(dirname "$0")/$3.csv"
fi
"""


def test_nsys_is_run_and_its_reports_are_read(tmp_path, monkeypatch, capsys):
    fake = tmp_path / "nsys"
    fake.write_text(FAKE_NSYS)
    fake.chmod(0o755)
    for report, text in PRINTED["2025"].items():
        (tmp_path / f"{report}.csv").write_text(text)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert main(["profile", "--tool", "nsys", "--out", str(tmp_path / "out"), "--", "true"]) == 0
    assert "symmetric products" in capsys.readouterr().out
    assert (tmp_path / "out" / "rank0_cuda_gpu_kern_sum.csv").read_text() == PRINTED["2025"]["cuda_gpu_kern_sum"]
    assert nsys.read(tmp_path / "out")[0].stages == pytest.approx(EXPECTED)


def test_without_nsys_it_says_how_to_get_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["profile", "--tool", "nsys", "--out", str(tmp_path / "out"), "--", "true"]) == 2
    assert "--tool torch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "after --"),
        (["--bench", "step", "--", "true"], "exclude"),
        (["--steps", "0", "--", "true"], "--steps"),
        (["--table", "no-such-folder"], "no folder"),
    ],
)
def test_bad_arguments_say_what_to_do(arguments, message, capsys):
    assert main(["profile", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_a_failing_or_too_short_command_is_reported(tmp_path, capsys):
    out = ["--tool", "torch", "--out", str(tmp_path)]
    assert main(["profile", *out, "--", sys.executable, "-c", "raise SystemExit(7)"]) == 7
    assert main(["profile", *out, "--", "true"]) == 2
    assert "enough steps" in capsys.readouterr().err


def test_the_benchmark_s_command_takes_as_many_steps_as_are_recorded(capsys):
    options = ["--tool", "torch", "--first", "4", "--steps", "5", "--dry-run"]
    assert main(["profile", *options, "--bench", "step", "--model", "qwen3-8b", "--device", "cpu"]) == 0
    command = capsys.readouterr().out
    assert "--rounds 7" in command
    assert "--model qwen3-8b" in command
    assert cli_profile.rows([nsys.profile(0, PRINTED["2024"], "x")])[0]["stage"] == "copy-in"


def test_ranges_cost_nothing_when_off():
    assert nvtx.span("a") is nvtx.span("b") is nvtx.step()
    start = time.perf_counter()
    for _ in range(10_000):
        with nvtx.span("fused_lw/pack"):
            pass
    assert (time.perf_counter() - start) / 10_000 < 20e-6


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"FUSED_LW_PROFILE": "perf"}, "nsys, torch"),
        ({"FUSED_LW_PROFILE": "torch", "FUSED_LW_PROFILE_STEPS": "3"}, "FIRST:COUNT"),
        ({"FUSED_LW_PROFILE": "torch", "FUSED_LW_PROFILE_STEPS": "0:3"}, "FIRST:COUNT"),
    ],
)
def test_an_environment_that_means_nothing_is_an_error(variables, message):
    with pytest.raises(ValueError, match=message):
        nvtx.from_environment(variables)


def test_no_environment_records_nothing():
    assert nvtx.from_environment({}) is None
