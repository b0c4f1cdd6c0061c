"""The child of a measurement: the forkserver takes an order, one case is measured, an answer goes
back. The parent reaches this room by name only.
"""
