"""The code under test as git sees it. In: a folder. Out: its commits, changed files and temporary
worktrees, and which file each module was loaded from.
"""
