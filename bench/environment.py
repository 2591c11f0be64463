"""What a row says about the machine and the code that it was measured with, and how rows are kept."""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import platform
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from fused_lw.arguments import check_writable, positive
from fused_lw.kernels.device import cpu_has_bf16_units

Row = dict[str, Any]


def default_device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of every benchmark that times something: where, on how many threads, and a file for the rows."""
    parser.add_argument("--device", default=default_device(), help="cpu, cuda or cuda:N (default: cuda if it is there)")
    parser.add_argument("--threads", type=positive, help="of a CPU (default: torch's)")
    add_json_argument(parser)


def add_json_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", type=Path, metavar="FILE", help="append the rows to this JSON Lines file")


def check_json(path: Path | None) -> None:
    """ValueError if rows cannot be appended there: said before anything is measured."""
    if path is not None:
        try:
            check_writable(path)
        except OSError as error:
            raise ValueError(f"--json: {error}") from error


def use(args: argparse.Namespace) -> torch.device:
    """The device of the command line, made torch's current one, with as many threads as asked for.

    ValueError for a device that is not there, saying what is, or a --json that cannot be written.
    """
    check_json(args.json)
    if args.threads is not None:
        torch.set_num_threads(args.threads)
    return use_device(args.device)


def use_device(name: str) -> torch.device:
    """The device of that name, made torch's current one; ValueError for one that is not there, saying what is."""
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ValueError(f"unknown device {name!r}: {error}") from error
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device must be cpu or cuda; got {name!r}")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"no device {name!r}: torch {torch.__version__} sees {torch.cuda.device_count()} CUDA devices "
            "(run with --device cpu, or install a CUDA build of torch and check nvidia-smi)"
        )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    return device


def describe(device: torch.device) -> Row:
    """The fields that every row has: device, driver, versions, threads, date, revision."""
    row: Row = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "device_type": device.type,
        "driver": driver(device),
        "torch": torch.__version__,
        "fused_lw": importlib.metadata.version("fused-lw"),
        "date": datetime.date.today().isoformat(),
        "revision": revision(),
    }
    if device.type == "cpu":
        row |= {"threads": torch.get_num_threads(), "bf16_units": cpu_has_bf16_units()}
    return row


def driver(device: torch.device) -> str | None:
    """The GPU driver's version, as nvidia-smi or the kernel module gives it; None on a CPU or where neither does."""
    if device.type != "cuda":
        return None
    module = Path("/sys/module/amdgpu/version" if torch.version.hip else "/sys/module/nvidia/version")
    return module.read_text().strip() if module.exists() else None


def cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def installed_version(module: str, distribution: str) -> str | None:
    """The version of an installed package, None if it is not installed. Nothing is imported."""
    if importlib.util.find_spec(module) is None:
        return None
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def revision() -> str:
    """The git revision of this checkout, "-dirty" with changes; "installed" outside of one."""
    folder = Path(__file__).resolve().parent
    done = subprocess.run(["git", "-C", folder, "describe", "--always", "--dirty"], capture_output=True, text=True)
    return done.stdout.strip() or "installed"


def append(path: Path, rows: Iterable[Row]) -> None:
    """Add rows to a JSON Lines file."""
    with path.open("a", encoding="utf-8") as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def read(paths: Sequence[Path]) -> list[Row]:
    """The rows of JSON Lines files; ValueError names the line that is none."""
    rows = []
    for path in paths:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise ValueError(f"{path}, line {number} is not JSON: {error}") from error
            if not isinstance(row, dict) or "benchmark" not in row or "provider" not in row:
                raise ValueError(f"{path}, line {number} is no row of fused-lw bench: it has no benchmark or provider")
            rows.append(row)
    if not rows:
        raise ValueError(f"no rows in {', '.join(map(str, paths))}")
    return rows
