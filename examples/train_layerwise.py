"""Layer-wise Muon over a plain module, instead of DistributedDataParallel.

    torchrun --nproc-per-node=2 examples/train_layerwise.py

Gradients are reduce-scattered to the ranks that own their matrices, which step them and send the new weights.
"""

from __future__ import annotations

from training import ADAMW, MUON, start, train

import fused_lw

if __name__ == "__main__":
    args, model = start(__doc__)
    optimizer = fused_lw.LayerWiseMuon(model, adamw=ADAMW, **MUON)
    train(args, model, optimizer, optimizer.no_sync)
