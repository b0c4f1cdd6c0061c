"""A script of somebody else, run as it is in a child: started, watched, its steps timed, its own
metrics read, its kernels profiled.
"""
