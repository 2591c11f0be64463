"""Which backend runs on a device, and why: decided by predicates, never by catching a failed launch."""

from __future__ import annotations

import functools
import importlib.util
import os
from pathlib import Path
from typing import Literal

import torch

Backend = Literal["auto", "torch", "triton"]
ResolvedBackend = Literal["torch", "triton"]

BACKENDS: tuple[Backend, ...] = ("auto", "torch", "triton")

# fp16/bf16 tensor cores and cp.async start with compute capability 8.0.
MIN_CUDA_CAPABILITY = (8, 0)
# How oneDNN is kept from bf16 instructions; it reads them once.
ISA_VARIABLES = ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA")
HIP_ARCHITECTURES = ("gfx942", "gfx950")


@functools.cache
def triton_available() -> bool:
    """True if Triton is installed. It is looked up, not imported: importing it takes most of a second."""
    return importlib.util.find_spec("triton") is not None


def interpreting() -> bool:
    """True if Triton kernels are interpreted on the CPU (`TRITON_INTERPRET=1`)."""
    return os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "yes", "on", "y")


def cpu_has_bf16_units() -> bool:
    """True if torch multiplies bf16 matrices with bf16 instructions on this CPU; without, it is far slower than fp32.

    The CPU has to have them, and oneDNN, which uses them, must not be switched off or kept from them.
    """
    return bool(torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled and _onednn_uses_bf16())


@functools.cache
def _onednn_uses_bf16() -> bool:
    try:
        flags = Path("/proc/cpuinfo").read_text()
    except OSError:
        return False
    for variable in ISA_VARIABLES:
        allowed = os.environ.get(variable, "DEFAULT").upper()
        if not any(word in allowed for word in ("DEFAULT", "ALL", "BF16", "AMX", "AVX10")):
            return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


@functools.cache
def architecture(device: torch.device) -> str:
    """Name of a device's architecture, "sm_90" or "gfx942"; "interpreter" for anything that is not a GPU."""
    if device.type != "cuda":
        return "interpreter"
    if torch.version.hip is not None:
        return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _obstacle(device: torch.device) -> str | None:
    """Why Triton kernels cannot run on `device`, with the remedy; None if they can."""
    if not triton_available():
        return "triton is not installed (pip install triton; it exists for Linux only)"
    if interpreting():
        return None if device.type in ("cpu", "cuda") else f"Triton has no interpreter for {device.type!r} tensors"
    if device.type == "cpu":
        return "Triton does not compile for CPUs (use backend='torch', or set TRITON_INTERPRET=1 to debug)"
    if device.type != "cuda":
        return f"there is no Triton backend for {device.type!r} devices (use backend='torch')"
    arch = architecture(device)
    if torch.version.hip is not None:
        known = ", ".join(HIP_ARCHITECTURES)
        return None if arch in HIP_ARCHITECTURES else f"{arch} is not among the supported {known}"
    if torch.cuda.get_device_capability(device) < MIN_CUDA_CAPABILITY:
        return f"{arch} is older than sm_80, the first architecture with the instructions the kernels use"
    return None


def resolve_backend(backend: Backend, device: torch.device) -> ResolvedBackend:
    """The backend to run on `device`.

    "auto" takes Triton on a GPU that can run it and torch everywhere else, the interpreter included: it is a
    debugging aid, hundreds of times slower. "triton" where Triton cannot run is a ValueError with the reason.
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {', '.join(BACKENDS)}; got {backend!r}")
    if backend == "torch":
        return "torch"
    obstacle = _obstacle(device)
    if backend == "triton":
        if obstacle is not None:
            raise ValueError(f"backend='triton' cannot run on {device}: {obstacle}")
        return "triton"
    return "triton" if device.type == "cuda" and obstacle is None and not interpreting() else "torch"


def explain_backend(device: torch.device) -> str:
    """One sentence that says what backend="auto" runs on `device`, and why."""
    chosen = resolve_backend("auto", device)
    if chosen == "triton":
        return f"triton: {device} is {architecture(device)}, for which kernels are configured"
    if interpreting() and device.type == "cuda":
        return "torch: TRITON_INTERPRET is set, so Triton kernels would be interpreted on the CPU"
    return f"torch: {_obstacle(device) or 'Triton kernels on a CPU run in the interpreter, for debugging only'}"
