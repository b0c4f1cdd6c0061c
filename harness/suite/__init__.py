"""A suite file read, validated and expanded: YAML in, `Suite` with its `Case`s out; every mistake
names its place.
"""
