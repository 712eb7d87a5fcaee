"""Pallas TPU kernels under test: dense ragged paged MLA and sparse MLA."""
