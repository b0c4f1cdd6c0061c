"""What cannot be done as asked: an explicit route that cannot run here, and training."""


class Unsupported(RuntimeError):
    """A route was asked for by name and cannot run here; the message says why and what would.

    Nothing else runs in its place: a number measured on another route is a wrong number.
    """


class TrainError(Exception):
    """Training cannot go as asked: the fact, then the remedy."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}\n  {remedy}")
