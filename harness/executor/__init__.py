"""One suite over several GPUs: on this node, on hosts by ssh, through Slurm. In: a suite, and an
`Executor` that starts commands on GPUs. Out: one run, merged from the runs of its blocks.
"""
