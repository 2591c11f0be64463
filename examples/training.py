"""What the three examples share: a process group, a small byte-level GPT, its batches, and the loop."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import torch
import torch.distributed as dist
from torch import nn

from fused_lw.demo import ByteGPT, Text, loss_of

MUON = {"lr": 0.02, "weight_decay": 0.05}
ADAMW = {"lr": 2e-3, "betas": (0.9, 0.95), "weight_decay": 0.0}


def start(description: str) -> tuple[argparse.Namespace, nn.Module]:
    """Join torchrun's process group, NCCL on GPUs and gloo elsewhere. Returns the options and the model."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--accumulate", type=int, default=1, help="micro-batches of each step")
    parser.add_argument("--width", type=int, default=192, help="a multiple of 6, the number of heads")
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    if torch.cuda.is_available():
        args.device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(args.device)
        dist.init_process_group("nccl", device_id=args.device)
    else:
        args.device = torch.device("cpu")
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    return args, ByteGPT(args.width, args.layers).to(args.device)


def train(
    args: argparse.Namespace,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    no_sync: Callable[[], AbstractContextManager[None]],
) -> None:
    """Train on batches that differ between ranks, and print the mean loss of every tenth step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    batches = Text.read(args.device).batches(seed=rank)
    for step in range(1, args.steps + 1):
        optimizer.zero_grad()
        total = torch.zeros((), device=args.device)
        for micro in range(args.accumulate):
            with nullcontext() if micro == args.accumulate - 1 else no_sync():
                loss = loss_of(model, next(batches)) / args.accumulate
                loss.backward()
            total += loss.detach()
        optimizer.step()
        if step == 1 or step % 10 == 0:
            dist.all_reduce(total)
            if rank == 0:
                print(f"step {step}: loss {float(total) / world:.6f}", flush=True)
    # A rank that takes its groups down while another still uses them may end in an abort (gloo).
    dist.barrier()
    dist.destroy_process_group()
