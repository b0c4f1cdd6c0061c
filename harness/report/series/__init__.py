"""Reports over time. In come two runs, a bisection, or a folder of reports; out go what changed
from one to the other, the page of a bisection, and all pages again with the list of the newest.
"""
