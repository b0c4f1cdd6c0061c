"""Measures, stores, judges, explains and draws; knows no kernel by name."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from harness.store.frames import RunFrames

__version__ = "0.1.0"


def load(run: str | Path = "latest", store: str | Path = "reports/runs") -> "RunFrames":
    """Read a stored run as pandas frames: cases, processes, samples, counters and steps.

    RunFrames (harness/store/frames.py) says which columns they have; `attrs["units"]` of each frame
    has the units, which are SI.

    Args:
        run: Its id, an unambiguous beginning of one, `latest`, or the path of its folder.

    Raises:
        StoreError: The run is absent or damaged, or has another schema.
    """
    from harness.store import frames  # pandas and scipy are slow to import

    return frames.load(run, store)
