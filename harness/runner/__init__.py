"""The parent of a measurement: a rig (locked GPU, launcher, probes), one fresh process per case
and repetition, watched from outside; two sides interleaved.
"""
