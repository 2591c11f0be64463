"""Layer-wise Muon under DistributedDataParallel, which reduces the gradients.

    torchrun --nproc-per-node=2 examples/train_ddp.py

Owners step their matrices and send the new weights.
"""

from __future__ import annotations

from torch.nn.parallel import DistributedDataParallel
from training import ADAMW, MUON, start, train

import fused_lw

if __name__ == "__main__":
    args, model = start(__doc__)
    model = DistributedDataParallel(model)
    optimizer = fused_lw.LayerWiseMuon(model, reduce="ddp", adamw=ADAMW, **MUON)
    train(args, model, optimizer, model.no_sync)
