"""Native Sparse Attention (arXiv:2502.11089). Stands alone: imports nothing of ours."""
