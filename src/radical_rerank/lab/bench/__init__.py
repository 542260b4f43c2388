"""Benchmarks of speed, memory and the service. Variants run interleaved; medians of ratios are reported."""
