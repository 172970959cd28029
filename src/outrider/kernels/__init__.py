"""Numeric kernels: one file each, the PyTorch reference first."""
