"""Which machine this is and whether it is fit to measure on: environment, doctor, drift between
two environments, NVML and CPU probes, the GPU lock.
"""
