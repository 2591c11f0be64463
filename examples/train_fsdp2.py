"""Layer-wise Muon over FSDP2: parameters, gradients and momenta stay sharded.

    torchrun --nproc-per-node=2 examples/train_fsdp2.py

Each matrix goes to its owner for Newton-Schulz, and the update comes back to the shards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.fsdp import fully_shard
from training import ADAMW, MUON, start, train

import fused_lw

if __name__ == "__main__":
    args, model = start(__doc__)
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = fused_lw.LayerWiseMuon(model, adamw=ADAMW, **MUON)

    @contextmanager
    def no_sync() -> Iterator[None]:
        model.set_requires_gradient_sync(False)
        yield
        model.set_requires_gradient_sync(True)

    train(args, model, optimizer, no_sync)
