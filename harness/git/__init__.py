"""The code under test as git has it: the repository, worktrees of its commits and their cleanup,
and which file a module was loaded from.
"""
