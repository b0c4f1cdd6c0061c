"""Suite files. In: YAML, overrides and filters. Out: a `Suite` with its `Case`s, or an error that
names place, cause and remedy of each mistake.
"""
