"""What the shipped configurations compile to for their targets, on a machine without any GPU."""

import functools
import json
import os
import subprocess
import sys

import pytest

pytest.importorskip("triton")


# Sums and copies: nothing to multiply, nothing to stage.
WITHOUT_PRODUCTS = {"reduce", "copy_in", "copy_out", "sum_tiles"}


def kind_of(report: dict) -> str:
    return report["name"].split("/")[1]


@functools.cache
def reports(target: str, only: str = "") -> list[dict]:
    # Triton decides at import whether to interpret, and these tests' process does.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "fused_lw.kernels.codegen", "--json", "--target", target, "--only", only]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(("target", "mma"), [("sm_90", "HGMMA"), ("sm_100", "UTCMMA")])
def test_hopper_and_blackwell_kernels_use_their_tensor_cores_and_do_not_spill(target, mma):
    found = reports(target)
    assert {kind_of(r) for r in found} == {"symmetric", "general", "update", "onchip"} | WITHOUT_PRODUCTS
    for r in found:
        assert r["spill_bytes"] == 0, r
        assert r["programs_per_sm"] >= 1, r
        if kind_of(r) in ("copy_in", "copy_out"):
            assert r["copies"]["WIDE"] > 0, r
        if kind_of(r) in WITHOUT_PRODUCTS:
            continue
        assert set(r["mma"]) == {mma}, r
        assert r["copies"].get("UTMALDG", 0) + r["copies"].get("LDGSTS", 0) > 0, r


@pytest.mark.parametrize(
    ("target", "mma"),
    [("sm_80", "HMMA"), ("sm_103", "UTCMMA"), ("sm_120", "HMMA"), ("gfx942", "MFMA"), ("gfx950", "MFMA")],
)
@pytest.mark.parametrize("only", ["/float16->float16", "/float32"])
def test_every_configuration_compiles_for_the_other_targets(target, mma, only):
    for r in reports(target, only):
        assert set(r["mma"]) == (set() if kind_of(r) in WITHOUT_PRODUCTS else {mma}), r
        assert r["programs_per_sm"] >= 1, r
        if not r["name"].endswith("onchip/float16->float16"):
            assert r["spill_bytes"] == 0, r
