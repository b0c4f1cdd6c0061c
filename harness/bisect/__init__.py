"""The first bad commit. In: a history and a case. Out: the commit that moved its number, with a
journal from which the search can resume. For two stored runs: a suite of their differences.
"""
