import argparse

import pytest
import torch

from fused_lw import cli_tune
from fused_lw.kernels.configs import SHIPPED, choose, is_valid
from fused_lw.kernels.tuning import TUNABLE, Measurement, candidates, is_right


@pytest.mark.parametrize("arch", [arch for arch in SHIPPED if arch != "interpreter"])
def test_candidates_are_valid_distinct_and_led_by_what_ships(arch):
    for kind, itemsize in [key for key in SHIPPED[arch] if key[0] in TUNABLE]:
        found = candidates(arch, kind, itemsize)
        assert found[0] == SHIPPED[arch][kind, itemsize]
        assert len(set(found)) == len(found) > 3
        assert all(is_valid(config, arch, kind, itemsize) for config in found)


@pytest.mark.skipif(torch.cuda.is_available(), reason="interprets")
@pytest.mark.parametrize("kind", ["symmetric", "general", "onchip"])
def test_the_gate_before_timing_tells_right_from_wrong(kind, monkeypatch):
    config = choose("interpreter", kind, torch.float16)
    device = torch.device("cpu")
    assert is_right(kind, torch.float16, config, device)
    monkeypatch.setattr("fused_lw.kernels.reference.run", lambda product: product.out.fill_(1.0))
    assert not is_right(kind, torch.float16, config, device)


def test_a_candidate_that_failed_is_never_the_fastest():
    config = choose("sm_90", "general", torch.float16)
    failed, slow = Measurement(config, (), "wrong result"), Measurement(config, (5.0, 7.0))
    assert min([failed, slow], key=lambda m: m.total) is slow
    assert slow.total == 12.0
    assert cli_tune.report("general", [failed]).row_count == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="would tune")
def test_without_a_gpu_the_command_says_so(capsys):
    parser = argparse.ArgumentParser()
    cli_tune.add_arguments(parser)
    assert cli_tune.run(parser.parse_args([])) == 1
    assert "torch sees none here" in capsys.readouterr().out
