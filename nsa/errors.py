"""Errors: a route that cannot run here, and training that cannot be carried out."""


class Unsupported(RuntimeError):
    """The requested route cannot run here; the message gives the reason and a route that can.

    No other route runs instead: its numbers would be reported under the wrong name.
    """


class TrainError(Exception):
    """Training cannot be carried out: the fact, then the remedy."""

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}\n  {remedy}")
