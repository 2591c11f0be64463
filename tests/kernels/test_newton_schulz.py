import math

import pytest
import torch

from fused_lw.kernels import (
    NSRule,
    Problem,
    count_launches,
    newton_schulz,
    orthogonalize,
    row_stride,
    schedule,
    scratch_nbytes,
)
from tests.kernels.matrices import exact, relative_error

JORDAN = schedule("jordan", 5)
BACKENDS = ["torch", "triton"]

# The interpreter computes with numpy, which warns about the NaN that these tests plant.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")


@pytest.fixture(autouse=True)
def _device_and_seed():
    """On a machine with a GPU the same tests run there."""
    torch.manual_seed(0)
    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        yield


@pytest.mark.parametrize("algorithm", ["auto", "standard", "gram"])
@pytest.mark.parametrize(
    "shape", [(1, 1), (1, 9), (9, 1), (7, 7), (33, 70), (70, 33), (2, 3, 5, 12), (450, 460), (24, 17, 18)], ids=str
)
def test_agrees_with_the_polynomial_in_float64(shape, algorithm):
    X = torch.randn(shape)
    result = newton_schulz(X, algorithm=algorithm)
    assert result.shape == X.shape and result.dtype == X.dtype
    assert relative_error(result, exact(X, JORDAN)) < 2e-5


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, "mixed"], ids=str)
@pytest.mark.parametrize(
    ("shape", "algorithm"),
    [((1, 1), "standard"), ((40, 70), "standard"), ((2, 65, 33), "standard"), ((66, 70), "gram")],
    ids=str,
)
def test_triton_agrees_with_torch(shape, dtype, algorithm):
    X = torch.randn(shape)
    triton, oracle = (newton_schulz(X, dtype=dtype, algorithm=algorithm, backend=b) for b in ("triton", "torch"))
    # Sums in another order can round a stored value the other way, and the iteration spreads that: all in all to less
    # than a rounding of the dtype, and in single elements to a few.
    tolerance = {torch.float32: 5e-6, torch.bfloat16: 1e-2}.get(dtype, 4e-3)
    assert relative_error(triton, oracle) <= tolerance
    assert (triton - oracle).abs().max() <= 3 * tolerance * oracle.abs().max()


@pytest.mark.parametrize("name", ["jordan", "polar_express_gram", "deepseek_v4"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, "mixed"], ids=str)
@pytest.mark.parametrize("shape", [(64, 64), (3, 5, 200), (90, 33)], ids=str)
def test_small_matrices_take_one_launch_and_round_only_the_input(shape, dtype, name):
    steps = 3 if name == "deepseek_v4" else 5
    X = torch.randn(shape)
    with count_launches() as launches:
        result = newton_schulz(X, coefficients=name, steps=steps, dtype=dtype, backend="triton")
    assert launches == {"onchip_kernel": 1}
    bound = 1e-3 if dtype == torch.float16 else 8e-3
    assert relative_error(result, exact(X, schedule(name, steps))) < bound


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("precision", ["fp32", "mixed"])
def test_any_strides_and_dtypes_and_out(backend, precision):
    dtype = torch.float32 if precision == "fp32" else precision
    X = torch.randn(18, 2, 13)
    expected = newton_schulz(X.permute(1, 0, 2).contiguous(), dtype=dtype, backend=backend)
    assert torch.equal(newton_schulz(X.permute(1, 0, 2), dtype=dtype, backend=backend), expected)
    out = torch.full((18, 2, 26), math.nan)[..., ::2].permute(1, 0, 2)
    assert newton_schulz(X.permute(1, 0, 2), dtype=dtype, backend=backend, out=out) is out
    assert torch.equal(out, expected)
    in_place = X.clone()
    newton_schulz(in_place.permute(1, 0, 2), dtype=dtype, backend=backend, out=in_place.permute(1, 0, 2))
    assert torch.equal(in_place.permute(1, 0, 2), expected)
    assert newton_schulz(X.double(), backend=backend).dtype == torch.float64


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, "mixed"], ids=str)
def test_the_input_is_left_as_it_is(dtype):
    X = torch.randn(3, 16, 32)
    before = X.clone()
    newton_schulz(X, dtype=dtype)
    assert torch.equal(X, before)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, "mixed"], ids=str)
@pytest.mark.parametrize("algorithm", ["standard", "gram"])
@pytest.mark.parametrize("eps", [0.0, 1e-50])  # the second is zero in float32
def test_zeros_and_nonfinite_stay_in_their_matrix(backend, dtype, algorithm, eps):
    X = torch.randn(5, 17, 35)
    X[1] = 0.0
    X[2, 3, 4] = math.nan
    X[3, 16, 34] = math.inf
    result = newton_schulz(X, dtype=dtype, backend=backend, algorithm=algorithm, eps=eps)
    assert torch.equal(result[1], torch.zeros_like(X[1]))
    assert not result[2].isfinite().any() and not result[3].isfinite().any()
    for i in (0, 4):
        alone = newton_schulz(X[i], dtype=dtype, backend=backend, algorithm=algorithm, eps=eps)
        assert torch.equal(result[i], alone)
    assert torch.equal(newton_schulz(X[[4, 0]], dtype=dtype, backend=backend, algorithm=algorithm), result[[4, 0]])


def problem(shape: tuple[int, int, int], rule: NSRule) -> Problem:
    batch, r, s = shape
    dtype = rule.workspace_dtype
    # NaN in the padding: nothing may read it.
    X = torch.full((batch, r, row_stride(s, dtype)), math.nan, dtype=dtype)[..., :s]
    X.copy_(torch.randn(shape))
    return Problem(X, X.float().square().sum((1, 2)))


def copy_of(p: Problem) -> Problem:
    X = torch.full((*p.X.shape[:2], p.X.stride(1)), math.nan, dtype=p.X.dtype)[..., : p.X.shape[2]]
    return Problem(X.copy_(p.X), p.sq_norm, p.scale)


def solve(problems: list[Problem], rule: NSRule, backend: str) -> list[torch.Tensor]:
    nbytes = scratch_nbytes([tuple(p.X.shape) for p in problems], rule, backend=backend)
    # NaN everywhere: what is not written before it is read shows; a guard behind: what is written outside shows.
    memory = torch.full((nbytes + 256,), 0xFF, dtype=torch.uint8)
    results = orthogonalize([copy_of(p) for p in problems], rule, backend=backend, scratch=memory[:nbytes])
    assert (memory[nbytes:] == 0xFF).all()
    return [result.clone() for result in results]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("precision", ["fp32", "mixed"])
def test_unlike_shapes_together_give_the_bits_of_each_alone(backend, precision):
    rule = NSRule(JORDAN, precision=precision)
    small = [(2, 33, 33), (2, 5, 20), (1, 1, 1)]
    problems = [problem(shape, rule) for shape in small + ([(1, 65, 66)] if precision == "mixed" else [])]
    together = solve(problems, rule, backend)
    for result, again in zip(together, solve(problems, rule, backend), strict=True):
        assert torch.equal(result, again)
    for p, result in zip(problems, together, strict=True):
        assert relative_error(result, exact(p.X, JORDAN)) < (1e-5 if precision == "fp32" else 3e-2)
    for p, result in zip(problems, together, strict=True):
        (alone,) = solve([p], rule, backend)
        assert torch.equal(result, alone)
    for result, again in zip(together, solve(problems[::-1], rule, backend)[::-1], strict=True):
        assert torch.equal(result, again)


def test_another_schedule_launches_the_same_kernels():
    rule = NSRule(JORDAN, precision="mixed", algorithm="gram")
    other = NSRule(schedule("quintic", 5), precision="mixed", algorithm="gram")
    problems = [problem((1, 66, 70), rule), problem((1, 20, 30), rule)]
    counts = []
    for r in (rule, other):
        with count_launches() as launches:
            solve(problems, r, "triton")
        counts.append(launches)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("eps_rule", ["clamp", "add"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_eps_bounds_the_norm(backend, eps_rule):
    rule = NSRule(JORDAN, eps=2.0, eps_rule=eps_rule, norm_factor=1.5)
    p = problem((2, 6, 11), rule)
    p.X[0] *= 0.01
    small = Problem(p.X, p.sq_norm * torch.tensor([1e-4, 1.0]))
    (result,) = solve([small], rule, backend)
    for i in range(2):
        norm = 1.5 * small.X[i].norm().double()
        X = small.X[i].double() / (norm + 2.0 if eps_rule == "add" else max(norm, 2.0))
        for a, b, c in JORDAN:
            A = X @ X.T
            X = a * X + (b * A + c * A @ A) @ X
        assert relative_error(result[i], X) < 1e-5


@pytest.mark.parametrize("magnitude", [1e-12, 1e-3, 1e6])
def test_fp16_input_is_scaled_into_range(magnitude):
    X = magnitude * torch.randn(16, 40)
    assert relative_error(newton_schulz(X, dtype=torch.float16, eps=0.0), exact(X, JORDAN)) < 5e-3


@pytest.mark.parametrize(
    ("X", "options", "error", "message"),
    [
        (torch.ones(2, 2, dtype=torch.complex64), {}, TypeError, "X must be a real floating"),
        (torch.ones(2, 2, dtype=torch.int32), {}, TypeError, "X must be a real floating"),
        (torch.ones(2), {}, ValueError, r"\[..., M, N\]"),
        (torch.ones(2, 0), {}, ValueError, "X is empty"),
        (torch.ones(2, 3), {"out": torch.ones(3, 2)}, ValueError, "out must be like X"),
        (torch.ones(2, 3), {"out": torch.ones(2, 3, dtype=torch.int8)}, TypeError, "out must be a real"),
        (torch.ones(2, 3), {"steps": 0}, ValueError, "steps"),
        (torch.ones(2, 3), {"coefficients": (1.0, 2.0)}, ValueError, "three numbers"),
        (torch.ones(2, 3), {"algorithm": "fast"}, ValueError, "algorithm must be one of"),
        (torch.ones(2, 3), {"dtype": torch.float64}, ValueError, "dtype must be"),
        (torch.ones(2, 3), {"backend": "cuda"}, ValueError, "backend must be one of"),
        (torch.ones(2, 3), {"eps": -1.0}, ValueError, "eps"),
    ],
)
def test_bad_input_is_refused(X, options, error, message):
    with pytest.raises(error, match=message):
        newton_schulz(X, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"X": torch.ones(2, 5, 4)}, "r <= s"),
        ({"X": torch.ones(2, 4, 5)}, "strides"),
        ({"X": torch.ones(2, 4, 8).half()}, "torch.float32"),
        ({"sq_norm": torch.ones(3)}, r"problems\[0\].sq_norm"),
        ({"scale": torch.ones(2).double()}, r"problems\[0\].scale"),
    ],
)
def test_bad_problems_are_refused(change, message):
    fields = {"X": torch.ones(2, 4, 8), "sq_norm": torch.ones(2), "scale": None} | change
    scratch = torch.empty(10**5, dtype=torch.uint8)
    with pytest.raises(ValueError, match=message):
        orthogonalize([Problem(**fields)], NSRule(JORDAN), backend="torch", scratch=scratch)


def test_short_scratch_is_refused():
    with pytest.raises(ValueError, match="scratch must be"):
        orthogonalize(
            [Problem(torch.ones(2, 4, 8), torch.ones(2))],
            NSRule(JORDAN),
            backend="torch",
            scratch=torch.empty(3, dtype=torch.uint8),
        )
