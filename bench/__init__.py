"""Benchmarks and simulations of the layers; what they write is committed in results/."""
