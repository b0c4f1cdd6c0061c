"""One suite over several GPUs by Ray. In: a suite and the address of a cluster, or this node. Out:
one run. Ray queues, places and retries the units; what is here is what a unit is, how one is
measured on its node, and how it enters the run.
"""
