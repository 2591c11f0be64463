"""fused-lw plan: its tables, files and errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fused_lw.cli import main
from fused_lw.layout import Layout, ParamSpec, model_specs, plan


def words(capsys: pytest.CaptureFixture[str]) -> list[list[str]]:
    return [line.replace("│", " ").split() for line in capsys.readouterr().out.splitlines()]


def row(lines: list[list[str]], *label: str) -> list[str]:
    return next(line[len(label) :] for line in lines if tuple(line[: len(label)]) == label)


def test_compare_shows_all_policies(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "nemotron-3-super", "--dp", "8", "--bucket-size", "238M", "--compare"]) == 0
    lines = words(capsys)
    arguments = {"dp_size": 8, "bucket_size": 238_000_000}
    params = model_specs("nemotron-3-super", kinds=("dense",))
    layouts = [plan(params, policy=policy, **arguments) for policy in ("numel", "megatron", "balanced")]
    assert row(lines, "buckets") == [str(len(layout.buckets)) for layout in layouts]
    assert row(lines, "padding") == [f"{layout.padding:.1%}" for layout in layouts]
    assert row(lines, "imbalance,", "max", "/", "mean") == [f"{layout.imbalance:.3f}" for layout in layouts]
    assert row(lines, "most", "batches", "on", "a", "rank") == [str(layout.launches) for layout in layouts]
    assert sum("buffer:" in line for line in lines) == 2  # dense and experts


def test_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    out, picture = tmp_path / "layout.json", tmp_path / "layout.png"
    command = ["plan", "--model", "moonlight-16b", "--dp", "16", "--ep", "8", "--expert-dp", "4"]
    assert main([*command, "--json", str(out), "--plot", str(picture)]) == 0
    dense = Layout.from_json((tmp_path / "layout-dense.json").read_text())
    assert dense == plan(model_specs("moonlight-16b", kinds=("dense",)), dp_size=16)
    assert Layout.from_json((tmp_path / "layout-expert.json").read_text()).dp_size == 4
    said = capsys.readouterr().out.replace("\n", "")
    for name in ("layout-dense.png", "layout-expert.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")
        assert name in said


def test_specs_and_cost_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    specs, table, out = tmp_path / "specs.json", tmp_path / "times.json", tmp_path / "layout.json"
    specs.write_text(json.dumps([{"name": f"w{i}", "shape": [4, 8], "gtp_size": 2} for i in range(8)]))
    table.write_text(json.dumps({"rows": [{"shape": [8, 8], "batch": 1, "seconds": 0.002}]}))
    command = ["plan", "--specs", str(specs), "--dp", "4", "--cost", str(table), "--json", str(out)]
    assert main(command) == 0
    lines = words(capsys)
    assert row(lines, "cost", "of", "the", "slowest", "rank,", "ms") == ["4.000"]
    layout = Layout.from_json(out.read_text())
    assert layout.params == tuple(ParamSpec(f"w{i}", (4, 8), gtp_size=2) for i in range(8))
    assert layout.cost_model == "table:times.json"


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        pytest.param(["--model", "gpt5", "--dp", "8"], "unknown model 'gpt5', expected one of: gpt2-124m", id="model"),
        pytest.param(["--model", "gpt2-124m", "--dp", "0"], "dp_size must be at least 1, got 0", id="dp"),
        pytest.param(["--model", "gpt2-124m", "--dp", "8", "--gtp", "0"], "gtp must be at least 1", id="gtp"),
        pytest.param(["--model", "qwen3-30b-a3b", "--dp", "8", "--ep", "7"], "ep 7 does not divide", id="ep"),
        pytest.param(["--model", "gpt2-124m", "--dp", "8", "--cost", "x"], "--cost x: expected megatron", id="cost"),
        pytest.param(["--specs", "nowhere.json", "--dp", "8"], "nowhere.json", id="no-file"),
        pytest.param(["--model", "gpt2-124m", "--dp", "8", "--ep", "3"], "gpt2-124m has no expert", id="ep-of-dense"),
        pytest.param(
            ["--model", "gpt2-124m", "--dp", "8", "--expert-dp", "4"], "--expert-dp 4 has no meaning", id="expert-dp"
        ),
        pytest.param(["--model", "experts-128", "--dp", "8", "--gtp", "2"], "no dense", id="gtp-of-experts"),
    ],
)
def test_errors_say_what_was_expected(arguments: list[str], reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("fused-lw plan: ")
    assert reason in captured.err


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        pytest.param('{"a": 1}', "expected a list of parameters, got dict", id="not-a-list"),
        pytest.param('[{"name": "w"}]', "parameter 0: expected name, shape", id="no-shape"),
        pytest.param(
            '[{"name": "w", "shape": [4, 4], "rows": 3}]', "parameter 0: expected name, shape", id="unknown-key"
        ),
        pytest.param('[{"name": "w", "shape": [0, 4]}]', "'w' of shape (0, 4) has no elements", id="no-elements"),
        pytest.param('[{"name": "w", "shape": [-4, -4]}]', "'w' of shape (-4, -4) has no elements", id="negative"),
        pytest.param('[{"name": "w", "shape": [4.5, 4]}]', "got 4.5", id="fraction"),
        pytest.param('[{"name": "w", "shape": "64"}]', "sequence of integers, got '64'", id="string"),
        pytest.param('[{"name": "w", "shape": [4, 4], "gtp_size": "2"}]', "gtp_size must be an integer", id="gtp"),
        pytest.param('[{"name": 3, "shape": [4, 4]}]', "name of a parameter must be a string", id="name"),
        pytest.param("[3]", "parameter 0: expected name, shape", id="no-object"),
        pytest.param("[", "specs.json is not JSON", id="not-json"),
    ],
)
def test_bad_specs(tmp_path: Path, text: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "specs.json"
    path.write_text(text)
    assert main(["plan", "--specs", str(path), "--dp", "2"]) == 2
    assert reason in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--ep", "--gtp", "--expert-dp"])
def test_options_of_models_are_not_ignored(option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "specs.json"
    path.write_text('[{"name": "w", "shape": [4, 4]}]')
    assert main(["plan", "--specs", str(path), "--dp", "2", option, "1"]) == 2
    assert f"{option} goes with --model" in capsys.readouterr().err


def test_nothing_to_plan_is_not_over_the_bound(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    path, picture = tmp_path / "specs.json", tmp_path / "nothing"
    path.write_text("[]")
    assert main(["plan", "--specs", str(path), "--dp", "2", "--compare", "--plot", str(picture)]) == 0
    assert row(words(capsys), "over", "the", "lower", "bound") == ["0.0%"] * 3
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("option", ["--json", "--plot"])
@pytest.mark.parametrize("place", ["nowhere/out.png", "specs.json/out.png", "."])
def test_what_cannot_be_written_is_said_first(
    option: str, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("fused_lw.cli_plan.plan", None)
    Path("specs.json").write_text('[{"name": "w", "shape": [4, 4]}]')
    assert main(["plan", "--specs", "specs.json", "--dp", "2", option, place]) == 2
    assert place in capsys.readouterr().err


@pytest.mark.parametrize("text", ["many", "-3", "1.5.2M"])
def test_bad_bucket_size(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "--model", "gpt2-124m", "--dp", "2", f"--bucket-size={text}"])
    assert "is not a number of elements such as 400000000 or 400M" in capsys.readouterr().err
