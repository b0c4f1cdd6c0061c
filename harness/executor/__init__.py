"""One suite over several GPUs by Ray. In: a suite and the address of a cluster, or this node. Out:
one run. Ray queues, places and retries; here is what a unit is, and how it enters the run."""
