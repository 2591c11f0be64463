"""fused_lw: a fused, layer-wise Muon optimizer."""

__version__ = "0.1.0"
