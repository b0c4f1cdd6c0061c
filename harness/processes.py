"""A process and what it started, for parent and child."""

import psutil


def family(pid: int) -> list[psutil.Process]:
    """A process and its descendants, oldest first; empty if it is gone."""
    try:
        process = psutil.Process(pid)
        return [process, *process.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []
