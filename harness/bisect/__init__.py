"""The first bad commit. In come a history and a case; out goes the commit that moved its number,
journalled so that the search can resume. For two stored runs: a suite of their differences.
"""
