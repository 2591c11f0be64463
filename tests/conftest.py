"""Without a CUDA device every Triton kernel of the tests runs in Triton's interpreter."""

import os

import torch

if not torch.cuda.is_available():
    # Read by triton.jit when a kernel's module is imported, so it has to be set before any test module.
    os.environ.setdefault("TRITON_INTERPRET", "1")

if "PYTEST_XDIST_WORKER" in os.environ:
    # Workers share the cores: one thread each, or they fight over them.
    torch.set_num_threads(1)
