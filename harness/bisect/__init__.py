"""The first bad commit, or the difference between two runs that moved a number: one search with
two subjects, journalled so that it can resume.
"""
