"""Rounding of fp32 inside Triton kernels."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def cast(x, DTYPE: tl.constexpr, INTERPRET: tl.constexpr):
    """fp32 to DTYPE, to nearest even."""
    if INTERPRET and tl.bfloat16 == DTYPE:
        # The interpreter truncates, and makes subnormal numbers of what is smaller than those.
        bits = x.to(tl.uint32, bitcast=True)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        y = tl.where(x == x, rounded, 0x7FC0).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(DTYPE)
    return y


@triton.jit
def mix(h):
    """A bijection of 32-bit integers whose outputs look random (MurmurHash3's finalizer)."""
    h ^= h >> 16
    h *= 0x85EBCA6B
    h ^= h >> 13
    h *= 0xC2B2AE35
    h ^= h >> 16
    return h


@triton.jit
def round_stochastically(x, key, index):
    """fp32 to bf16, up with the probability of what is cut off. As `pack_reference.round_stochastically`."""
    noise = mix(key ^ mix(index)) & 0xFFFF
    bits = (x.to(tl.uint32, bitcast=True) + noise) & 0xFFFF0000
    finite = tl.abs(x) < float("inf")
    return tl.where(finite, bits.to(tl.float32, bitcast=True), x).to(tl.bfloat16)
