"""What all kernels share: limits and architectures of devices, launches, tiles and streams.

`device` knows what a GPU takes, `launch` starts compiled kernels at little cost to the host,
`tiles` brings tiles of a tensor from memory, and `streams` runs kernels beside the caller's stream.
"""
