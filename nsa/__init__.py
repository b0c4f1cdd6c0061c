"""Native Sparse Attention (arXiv:2502.11089). Imports no other package of this repository."""
