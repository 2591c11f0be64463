"""bf16 parameters: stochastic rounding follows the fp32 run on average, master weights follow it exactly."""

from __future__ import annotations

import copy

import pytest
import torch

import fused_lw

BF16_STEP = 2**-8  # between neighbours in [0.5, 1)


def moved(dtype: torch.dtype, rounding: str, steps: int = 1000) -> float:
    """Mean movement over steps whose updates are a fiftieth of what bf16 resolves."""
    start = 0.9
    param = torch.nn.Parameter(torch.full((32, 64), start).to(dtype))
    start = float(param[0, 0].detach())
    # Every element of the orthogonal factor of a constant matrix is the same, about 1 / sqrt(32 * 64).
    optimizer = fused_lw.Muon([param], lr=0.02 * BF16_STEP * (32 * 64) ** 0.5, weight_decay=0.0, rounding=rounding)
    for _ in range(steps):
        param.grad = torch.ones_like(param)
        optimizer.step()
    return float(param.detach().double().mean()) - start


def test_stochastic_rounding_follows_fp32_where_nearest_stays_put():
    exact = moved(torch.float32, "nearest")
    assert exact < -5 * BF16_STEP, "the updates add up"
    assert moved(torch.bfloat16, "nearest") == 0.0
    assert moved(torch.bfloat16, "stochastic") == pytest.approx(exact, rel=0.02)


@pytest.mark.parametrize("weight_decay", [0.0, 0.5])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_master_weights_equal_the_fp32_run_rounded(dtype, weight_decay):
    shapes = [(8, 16), (16, 8), (3, 8, 8)]
    generator = torch.Generator().manual_seed(0)
    low = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in shapes]
    full = [torch.nn.Parameter(param.detach().float()) for param in low]
    options = {"lr": 0.01, "weight_decay": weight_decay}
    low_optimizer = fused_lw.Muon(low, master_weights=True, momentum_dtype=torch.float32, **options)
    full_optimizer = fused_lw.Muon(full, **options)
    for step in range(20):
        for a, b in zip(low, full, strict=True):
            a.grad = torch.randn(a.shape, generator=generator).to(dtype)
            b.grad = a.grad.float()
        low_optimizer.step()
        full_optimizer.step()
        if step == 10:  # master weights survive a checkpoint
            saved = copy.deepcopy(low_optimizer.state_dict())
            low_optimizer = fused_lw.Muon(low, master_weights=True, momentum_dtype=torch.float32)
            low_optimizer.load_state_dict(saved)
    for a, b in zip(low, full, strict=True):
        assert low_optimizer.state[a]["master_param"].dtype == torch.float32
        assert torch.equal(low_optimizer.state[a]["master_param"], b)
        assert torch.equal(a, b.to(dtype))


def test_stochastic_rounding_repeats_from_a_seed_and_from_a_checkpoint():
    def run(seed: int, interrupted: bool = False) -> torch.Tensor:
        param = torch.nn.Parameter(torch.full((8, 16), 0.9, dtype=torch.bfloat16))
        options = {"lr": 0.01, "rounding": "stochastic", "seed": seed}
        optimizer = fused_lw.Muon([param], **options)
        for step in range(6):
            if interrupted and step == 3:
                saved = copy.deepcopy(optimizer.state_dict())
                optimizer = fused_lw.Muon([param], **options)
                optimizer.load_state_dict(saved)
            param.grad = torch.ones_like(param)
            optimizer.step()
        return param.detach()

    assert torch.equal(run(0), run(0))
    assert torch.equal(run(0), run(0, interrupted=True))
    assert not torch.equal(run(0), run(1))


def test_stochastic_rounding_refuses_float16():
    with pytest.raises(ValueError, match="weight is float16: stochastic rounding is for bfloat16"):
        fused_lw.Muon([("weight", torch.nn.Parameter(torch.ones(4, 4).half()))], rounding="stochastic")
