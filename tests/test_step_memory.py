"""What a step holds and allocates: scratch memory under its bound, nothing new after the first step, launches."""

from __future__ import annotations

import subprocess
import sys
import weakref
from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import fused_lw
from fused_lw.kernels import pack, triton_backend
from fused_lw.kernels.launch import launch
from fused_lw.layout import model_specs, plan

MEASURE_PEAK = """
import re, torch, fused_lw

def status(field):
    return int(re.search(field + r":\\s+(\\d+) kB", open("/proc/self/status").read()).group(1)) * 1024

torch.set_num_threads(1)
# 2 GB of parameters. Short sides of 32 keep the iteration itself cheap.
params = [torch.nn.Parameter(torch.ones(32, 2**16)) for _ in range(250)]
params = [*params, torch.nn.Parameter(torch.ones(2**14, 32))]
for param in params:
    param.grad = torch.ones_like(param)
optimizer = fused_lw.Muon(params, max_scratch_bytes=BOUND, ns_steps=1)
small = torch.nn.Parameter(torch.ones(32, 2**10))
small.grad = torch.ones_like(small)
fused_lw.Muon([small]).step()  # loads what a first step loads
for param in params:
    optimizer.state[param]["momentum_buffer"] = torch.ones_like(param)
open("/proc/self/clear_refs", "w").write("5")  # forget the peak so far
before = status("VmRSS")
optimizer.step()
print(sum(p.numel() * 4 for p in params), status("VmHWM") - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_peak_memory_of_a_step_stays_under_the_bound():
    bound = 256 * 2**20
    script = MEASURE_PEAK.replace("BOUND", str(bound))
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    inventory, peak = map(int, done.stdout.split())
    assert inventory > 2e9
    # A few MB are what the interpreter and the matrix library take beside the scratch memory.
    assert 0.5 * bound < peak < bound + 16 * 2**20


class Recorder(TorchDispatchMode):
    """Notes the operations that wait for a device, and the bytes of new tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.allocated = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        name = function.__name__
        if name.startswith(("_local_scalar_dense", "_to_copy", "is_nonzero", "equal", "item")):
            self.waits.append(name)
        inputs = [t for t in [*args, *(kwargs or {}).values()] if isinstance(t, torch.Tensor)]
        known = {t.untyped_storage().data_ptr() for t in inputs}
        if isinstance(out, torch.Tensor) and out.untyped_storage().data_ptr() not in known:
            self.allocated += out.untyped_storage().nbytes()
        return out


def record_steps(optimizer, monkeypatch, steps: int) -> Recorder:
    """Record `steps` steps, without what Triton's interpreter does inside a kernel."""
    recorder = Recorder()

    def unrecorded(kernel, *args, **kwargs):
        with torch.utils._python_dispatch._disable_current_modes():
            launch(kernel, *args, **kwargs)

    for module in (pack, triton_backend):
        monkeypatch.setattr(module, "launch", unrecorded)
    with recorder:
        for _ in range(steps):
            optimizer.step()
    return recorder


def make_optimizer(backend: str, count: int = 2, **options):
    generator = torch.Generator().manual_seed(0)
    shapes = [(16, 24), (24, 16), (16, 16)] * count
    params = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes]
    for param in params:
        param.grad = torch.randn(param.shape, generator=generator)
    return fused_lw.Muon(params, backend=backend, **options), params


def test_captured_step_neither_waits_nor_copies_nor_allocates(monkeypatch):
    lr = torch.tensor(0.1)
    optimizer, _ = make_optimizer("triton", lr=lr, weight_decay=torch.tensor(0.1), capturable=True)
    optimizer.step()
    recorder = record_steps(optimizer, monkeypatch, 2)
    assert recorder.waits == []
    assert recorder.allocated == 0


def test_the_recorder_sees_waits_and_allocations(monkeypatch):
    """The check above can fail: without capturable the tensor lr is read, and the first step allocates."""
    optimizer, _ = make_optimizer("triton", lr=torch.tensor(0.1))
    recorder = record_steps(optimizer, monkeypatch, 1)
    assert "_local_scalar_dense.default" in recorder.waits
    assert recorder.allocated > 10_000


@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_a_captured_step_follows_lr_in_place(rounding):
    """What a replayed graph would do: the same launches read another learning rate, and draw other noise."""
    steps = {}
    for capturable in (True, False):
        generator = torch.Generator().manual_seed(0)
        param = torch.nn.Parameter(torch.randn(16, 24, generator=generator).bfloat16())
        lr = torch.tensor(0.1)
        optimizer = fused_lw.Muon([param], lr=lr, backend="triton", capturable=capturable, rounding=rounding)
        for value in (0.1, 0.0, 0.3):
            lr.fill_(value)
            before = param.detach().clone()
            param.grad = torch.ones_like(param)
            optimizer.step()
            steps.setdefault(value, []).append(param.detach().clone())
            assert torch.equal(param, before) == (value == 0.0)
    for captured, plain in steps.values():
        assert torch.equal(captured, plain)


def test_capturable_refuses_an_lr_on_another_device():
    param = torch.nn.Parameter(torch.ones(4, 4, device="meta"))
    optimizer = fused_lw.Muon([param], lr=torch.tensor(0.1), capturable=True)
    with pytest.raises(ValueError, match="capturable=True a tensor lr must be on the parameters' device meta, not cpu"):
        optimizer.step()


def test_torch_backend_allocates_no_more_for_more_matrices(monkeypatch):
    allocated = []
    for count in (1, 8):
        optimizer, _ = make_optimizer("torch", count)
        optimizer.step()
        allocated.append(record_steps(optimizer, monkeypatch, 1).allocated)
    # A few bytes a matrix are 0-d tensors; one 16 x 24 matrix would be 1,536 bytes.
    assert (allocated[1] - allocated[0]) / (7 * 3) < 64


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_gradients_are_not_kept_alive(backend):
    optimizer, params = make_optimizer(backend)
    optimizer.step()
    grad = weakref.ref(params[0].grad)
    optimizer.zero_grad(set_to_none=True)
    assert grad() is None


def test_moved_tensors_are_found_again():
    optimizer, params = make_optimizer("triton")
    twin, twin_params = make_optimizer("triton")
    optimizer.step()
    twin.step()
    held = [param.grad for param in params]  # so that the new ones lie elsewhere
    for param in params:
        param.grad = param.grad.clone()
        param.data = param.data.clone()
        optimizer.state[param]["momentum_buffer"] = optimizer.state[param]["momentum_buffer"].clone()
    optimizer.step()
    twin.step()
    assert held
    for a, b in zip(params, twin_params, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("precision", ["mixed", "fp16", "bf16"])
def test_launches_of_a_step_of_a_nemotron_rank(monkeypatch, precision):
    """Full-size matrices of the rank with the most shapes, described but not run: nothing here touches their memory."""
    launches = Counter[str]()

    def count_only(kernel, *args, **kwargs):
        launches[kernel.__name__] += 1

    for module in (pack, triton_backend):
        monkeypatch.setattr(module, "launch", count_only)
    layout = plan(model_specs("nemotron-3-nano", ep=16), dp_size=32)
    shapes = {name: group.shape for rank in range(32) for group in layout.groups(rank) for name in group.names}
    names = max(
        ([name for group in layout.groups(rank) for name in group.names] for rank in range(32)),
        key=lambda names: len({shapes[name] for name in names}),
    )
    params = [torch.nn.Parameter(torch.empty(shapes[name])) for name in names]
    for param in params:
        param.grad = torch.empty_like(param)
    optimizer = fused_lw.Muon(params, backend="triton", precision=precision, max_scratch_bytes=16 * 2**30)
    optimizer.step()
    assert launches["update_kernel"] >= 1
    assert sum(launches.values()) <= 30
    assert sum(n for kernel, n in launches.items() if "copy" not in kernel and "sum_tiles" not in kernel) <= 20
