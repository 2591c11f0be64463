import subprocess
import sys

import pytest
import torch

from fused_lw.kernels import count_launches, explain_backend, launch, resolve_backend
from fused_lw.kernels import device as device_module

CPU = torch.device("cpu")


def test_a_cpu_gets_torch_unless_the_interpreter_is_asked_for(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert resolve_backend("auto", CPU) == resolve_backend("torch", CPU) == "torch"
    assert resolve_backend("triton", CPU) == "triton"
    assert explain_backend(CPU).startswith("torch: ") and "interpreter" in explain_backend(CPU)
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match=r"cannot run on cpu: .*use backend='torch'"):
        resolve_backend("triton", CPU)
    assert "does not compile for CPUs" in explain_backend(CPU)


def test_every_obstacle_is_named(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match="no Triton backend for 'mps'"):
        resolve_backend("triton", torch.device("mps"))
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(device_module, "architecture", lambda device: "sm_75")
    with pytest.raises(ValueError, match="sm_75 is older than sm_80"):
        resolve_backend("triton", gpu)
    assert resolve_backend("auto", gpu) == "torch"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert resolve_backend("auto", gpu) == "triton"
    monkeypatch.setattr(device_module, "triton_available", lambda: False)
    assert "triton is not installed" in explain_backend(gpu)
    with pytest.raises(ValueError, match="backend must be one of auto, torch, triton"):
        resolve_backend("cuda", CPU)


def test_everything_but_the_kernels_works_without_triton():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch, fused_lw.kernels as k, fused_lw.kernels.tuning, fused_lw.kernels.codegen\n"
        "rule = k.NSRule(k.schedule('jordan', 5), algorithm='standard')\n"
        "print(k.newton_schulz(torch.eye(3)).shape, k.work([(1, 100, 200)], rule).launches)\n"
        "k.newton_schulz(torch.eye(3), backend='triton')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "torch.Size([3, 3]) 15" in done.stdout
    assert done.stderr.splitlines()[-1].startswith("ValueError: backend='triton' cannot run on cpu: triton is not inst")


class Kernel:
    __name__ = "a_kernel"

    def __init__(self):
        self.calls = []

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self.calls.append((grid, args, kwargs))


def test_launches_are_counted_in_every_open_block():
    kernel = Kernel()
    launch(kernel, (1,))
    with count_launches() as outer:
        launch(kernel, (2,), 3, x=4)
        with count_launches() as inner:
            launch(kernel, (5,))
    launch(kernel, (6,))
    assert outer == {"a_kernel": 2} and inner == {"a_kernel": 1}
    assert kernel.calls[1] == ((2,), (3,), {"x": 4})
    assert [grid for grid, *_ in kernel.calls] == [(1,), (2,), (5,), (6,)]


@pytest.mark.parametrize("variable", ["ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"])
def test_bf16_units_that_onednn_must_not_use_do_not_count(variable, monkeypatch):
    device_module._onednn_uses_bf16.cache_clear()
    monkeypatch.setenv(variable, "AVX2")
    assert not device_module.cpu_has_bf16_units()
    device_module._onednn_uses_bf16.cache_clear()
    monkeypatch.delenv(variable)
    monkeypatch.setattr("torch.backends.mkldnn.is_available", lambda: False)
    assert not device_module.cpu_has_bf16_units()
