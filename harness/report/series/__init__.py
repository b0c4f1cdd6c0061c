"""Reports over time. In come two runs, or a folder of reports; out go what changed from one to the
other, and the table of the newest reports.
"""
