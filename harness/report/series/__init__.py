"""Reports over time. In come two runs, the verdict of a gate, a bisection, or a folder of reports;
out go what changed from one to the other, the words of a gate, the page of a bisection, and all
pages again with the list of the newest.
"""
