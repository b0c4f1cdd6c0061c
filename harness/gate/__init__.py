"""A change against its base: policy and changed files in, a plan, interleaved measurements, and
one verdict out. Two stored runs are compared here too.
"""
