"""The error of an explicit route that cannot run here."""


class Unsupported(RuntimeError):
    """A route was asked for by name and cannot run here; the message says why and what would.

    Nothing else runs in its place: a number measured on another route is a wrong number.
    """
