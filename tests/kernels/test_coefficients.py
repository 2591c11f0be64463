import math

import pytest

from fused_lw.kernels import coefficient_names, norm_factor, schedule


def test_one_triple_is_used_in_every_step():
    assert schedule((3.0, -3.2, 1.2), 3) == ((3.0, -3.2, 1.2),) * 3


def test_cycling_and_repeating_schedules_go_on_as_their_authors_do():
    quintic = schedule("quintic", 7)
    assert quintic[5:] == quintic[:2]
    eo = schedule("polar_express_eo", 10)
    assert eo[8] == eo[9] == (1.875, -1.25, 0.375)
    assert schedule("deepseek_v4", 10)[7:9] == ((3.4445, -4.775, 2.0315), (2.0, -1.5, 0.5))


def test_polar_express_scalings_divide_by_the_safety_factor():
    raw = schedule("polar_express_raw", 5)
    for (a, b, c), (ra, rb, rc) in zip(schedule("polar_express_gram", 5), raw, strict=True):
        assert (a, b, c) == (ra / 1.05, rb / 1.05**3, rc / 1.05**5)
    heavyball = schedule("polar_express_heavyball", 5)
    assert heavyball[0][0] == raw[0][0] / 1.01
    assert heavyball[4] == raw[4]
    assert norm_factor("polar_express_dion") == 1.02
    assert norm_factor("jordan") == norm_factor((1.0, 2.0, 3.0)) == 1.0


@pytest.mark.parametrize("name", coefficient_names())
def test_every_named_schedule_orthogonalizes(name):
    # aol has four steps, and a fifth starts over: from near 1 its first triple leads away again.
    steps = 4 if name == "aol" else 5
    for sigma in (0.7, 0.3, 0.1):
        x = sigma / norm_factor(name)
        for a, b, c in schedule(name, steps):
            x = a * x + b * x**3 + c * x**5
        assert 0.4 < x < 1.4


@pytest.mark.parametrize(
    ("coefficients", "steps", "error", "message"),
    [
        ("polar_express", 5, ValueError, "several scalings, name one: polar_express_raw"),
        ("jordn", 5, ValueError, "unknown coefficients 'jordn'"),
        ("cubic5", 6, ValueError, "defined for 5 steps"),
        ("jordan", 0, ValueError, "at least 1"),
        ("jordan", 2.0, TypeError, "integer"),
        ("jordan", True, TypeError, "integer"),
        ([], 5, ValueError, "empty"),
        ((1.0, 2.0), 5, ValueError, "three numbers"),
        ([(1.0, 2.0, 3.0), (1.0, 2.0)], 2, ValueError, r"coefficients\[1\]"),
        ([(1.0, 2.0, 3.0)] * 4, 5, ValueError, "4 triples for steps=5"),
        ((1.0, "x", 3.0), 5, TypeError, "three numbers"),
        ((1.0, math.nan, 3.0), 5, ValueError, "finite"),
    ],
)
def test_bad_schedules_are_refused(coefficients, steps, error, message):
    with pytest.raises(error, match=message):
        schedule(coefficients, steps)
