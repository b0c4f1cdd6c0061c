"""Inside a program: notes which of the watched variables and options its Python reads.

A variable is read when it is taken from os.environ by name; an option, when its value is taken by
name from the result of argparse. A copy of all of them is noted too: who has it may read any.
"""

import argparse
import os
import sys
from collections.abc import Callable, Collection, Iterator
from typing import Any

Note = Callable[..., None]
TQDM = "tqdm.utils"
"""Torch imports it, and it looks through all variables for its own: that is no copy."""


def watch_environment(variables: Collection[str], note: Note) -> None:
    """Watch os.environ until it is copied."""
    left = {*variables}
    passes, copied = 0, False
    kind: Any = type(os.environ)
    take, iterate = kind.__getitem__, kind.__iter__

    def getitem(environ: Any, name: Any) -> Any:
        value = take(environ, name)
        if name in left and not passes and not copied:
            left.discard(name)
            note(read=name)
        return value

    def every(environ: Any) -> Iterator[Any]:
        nonlocal passes, copied
        frame = sys._getframe(1)
        callers = {f.f_globals.get("__name__") for f in (frame, frame.f_back) if f}
        if not copied and TQDM not in callers:
            copied = True
            note(copied="variables")
        passes += 1
        try:
            yield from iterate(environ)
        finally:
            passes -= 1

    kind.__getitem__, kind.__iter__ = getitem, every


def watch_parsers(options: Collection[str], note: Note) -> None:
    """Watch all parsers of argparse, and what they return."""
    parser: Any = argparse.ArgumentParser
    result: Any = argparse.Namespace
    parse, show, take = parser.parse_known_args, result.__repr__, result.__getattribute__
    left = {"__dict__": {"copied": "options"}}  # attribute of a result -> its note
    inside = False  # argparse's own code reads nothing for the program

    def quietly(function: Callable[..., Any], *args: Any) -> Any:
        nonlocal inside
        before, inside = inside, True
        try:
            return function(*args)
        finally:
            inside = before

    def parse_known_args(own: Any, args: Any = None, namespace: Any = None) -> Any:
        given = [*(sys.argv[1:] if args is None else args)]
        found, rest = quietly(parse, own, given, namespace)
        if result.__getattribute__ is not type(found).__getattribute__:
            note(copied="options")
        for option in {*options} & {word.partition("=")[0] for word in given}:
            if action := own._option_string_actions.get(option):
                left[action.dest] = {"read": option}
                note(parsed=option)
        dropped = {*options} & {word.partition("=")[0] for word in rest}
        for option in dropped if not inside else ():
            note(dropped=option)
        return found, _Rest(note, rest) if dropped and not inside else rest

    def getattribute(own: Any, name: str) -> Any:
        value = take(own, name)
        if not inside and (said := left.pop(name, None)):
            note(**said)
        return value

    parser.parse_known_args = parse_known_args
    result.__getattribute__ = getattribute
    result.__repr__ = lambda own: quietly(show, own)


class _Rest(list[str]):
    """Arguments that no parser knew, which note that something uses them."""

    def __init__(self, note: Note, rest: list[str]) -> None:
        super().__init__(rest)
        self.note = note


def _noting(name: str) -> Callable[..., Any]:
    method = getattr(list, name)
    return lambda own, *args: (own.note(copied="rest"), method(own, *args))[1]


for _name in ("__iter__", "__len__", "__getitem__", "__contains__", "__add__"):
    setattr(_Rest, _name, _noting(_name))
