"""Which machine this is and whether it is fit to measure on. In: the facts of a worker. Out: the
environment record, its differences from another, the doctor's checks, probe readings, and a lock
that keeps other harnesses off the GPU.
"""
