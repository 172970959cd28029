"""Kernels of captured steps: static shapes, addresses and counts read from device memory, nothing returned to the host.

Conventions. R is the row bucket; rows from `count` (int32 [1]) on do not exist and are skipped (a projection may write
the rest of its last tile of 16 rows, which nobody reads). A projection leaves
partial sums over parts of K, float32 [parts, R, N], which its consumer adds in order; so a row's bits depend on the row
alone. Every wrapper has its PyTorch reference beside it, and the tests hold one against the other.
"""
