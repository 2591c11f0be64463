"""What a user installs: a wheel built from a copy of the tree, in a fresh virtual environment elsewhere."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    leave_out = shutil.ignore_patterns(".*", "build", "dist", "demo-out", "*.egg-info", "__pycache__")
    shutil.copytree(ROOT, folder / "tree", symlinks=True, ignore=leave_out)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--quiet", "--wheel-dir", folder, folder / "tree"]
    subprocess.run(command, check=True)
    (built,) = folder.glob("*.whl")
    return built


def test_wheel_installs_one_top_level_name_with_its_data(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"fused_lw"}
    for needed in (
        "fused_lw/py.typed",
        "fused_lw/muon.py",
        "fused_lw/kernels/pack.py",
        "fused_lw/kernels/coefficients.json",
        "fused_lw/layout/models.json",
        "fused_lw/bench/layouts.py",
    ):
        assert needed in names
    assert not any("test" in name for name in names)


def test_installed_wheel_imports_in_a_fresh_environment_elsewhere(wheel, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    paths = sysconfig.get_paths(vars={"base": str(tmp_path / "venv"), "platbase": str(tmp_path / "venv")})
    zipfile.ZipFile(wheel).extractall(paths["purelib"])
    # torch and the other dependencies come from this environment; nothing of the tree does.
    dependencies = Path(sysconfig.get_paths()["purelib"])
    (Path(paths["purelib"]) / "dependencies.pth").write_text(f"{dependencies}\n")
    script = (
        "import fused_lw, fused_lw.kernels, fused_lw.layout, sys; "
        "assert 'fused_lw.bench' not in sys.modules; import fused_lw.bench.layouts as bench; "
        "print(fused_lw.__file__, fused_lw.kernels.__file__, fused_lw.layout.__file__, bench.__file__); "
        "fused_lw.Muon; "
        "assert 'kernels' not in sys.modules and 'layout' not in sys.modules"
    )
    done = subprocess.run([python, "-c", script], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert all(Path(file).is_relative_to(tmp_path) for file in done.stdout.split())
    command = [python, "-m", "fused_lw.cli", "bench", "ns", "--help"]
    assert "--sweep" in subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    command = [python, "-m", "fused_lw.cli", "--help"]
    assert "doctor" in subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("package", ["bench", "kernels", "layout"])
def test_top_level_folders_refuse_to_be_imported_as_packages(package):
    done = subprocess.run([sys.executable, "-c", f"import {package}"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode != 0
    assert f"import fused_lw.{package}" in done.stderr


def test_planning_does_not_import_torch():
    script = "import sys, fused_lw.layout; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)


def test_kernels_import_without_triton_and_touch_no_device():
    script = (
        "import sys; sys.modules['triton'] = None; import fused_lw.kernels, fused_lw.muon, torch; "
        "assert not torch.cuda.is_initialized(); "
        "p = torch.nn.Parameter(torch.ones(2, 3)); p.grad = torch.ones(2, 3); fused_lw.Muon([p]).step()"
    )
    subprocess.run([sys.executable, "-c", script], cwd=ROOT, check=True)
