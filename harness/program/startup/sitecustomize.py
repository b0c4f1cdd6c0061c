"""Python imports this at the start of every process of a program that is counted.

Its folder is first on PYTHONPATH. Reads of os.environ and of parsed arguments are watched from the
start; the code that measures is loaded when the process imports torch. The sitecustomize that this
one hides runs as usual.
"""

import importlib.util
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType

VARIABLE = "HARNESS_COUNTS_IN"
"""Names the folder with ORDER, in which the answer is written."""
ORDER = "order.json"
NOTES = "notes.jsonl"
"""Progress of each process, one JSON object a line."""

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]


def note(folder: Path, **said: object) -> None:
    """Append one note, in one write."""
    line = json.dumps({"pid": os.getpid(), **said}) + "\n"
    with (folder / NOTES).open("ab", buffering=0) as notes:
        notes.write(line.encode())


def _start() -> None:
    folder = Path(os.environ.get(VARIABLE, ""))
    sys.path[:] = [p for p in sys.path if not p or os.path.realpath(p) != str(HERE)]
    if VARIABLE in os.environ and os.environ.get("RANK", "0") == "0":  # one rank is enough
        note(folder, at="start", argv=sys.orig_argv)
        with _ours():
            from harness.program.startup import reads
        order = json.loads((folder / ORDER).read_text(encoding="utf-8"))
        reads.watch_environment(order["variables"], partial(note, folder))
        reads.watch_parsers(order["options"], partial(note, folder))
        sys.meta_path.insert(0, _Torch(folder))
    _run_other()


def _run_other() -> None:
    """Run the sitecustomize that this one hides."""
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


class _Torch:
    """Waits until the other importers load torch, then watches the steps."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def then_watch(module: ModuleType) -> None:
                execute(module)
                _watch(self._folder)

            spec.loader.exec_module = then_watch  # type: ignore[method-assign]
        return spec


def _watch(folder: Path) -> None:
    try:
        with _ours():
            from harness.program import step_hook
        step_hook.watch(folder / ORDER, lambda **said: note(folder, **said))
    except Exception as error:  # noqa: BLE001 - noted; the program continues uncounted
        note(folder, failed=f"{type(error).__name__}: {error}")


@contextmanager
def _ours() -> Iterator[None]:
    """Import the harness that measures, and hide it from the program, which may import another."""
    theirs = {name: sys.modules.pop(name) for name in _loaded()}
    sys.path.insert(0, str(ROOT))
    try:
        yield
    finally:
        sys.path.remove(str(ROOT))
        for name in _loaded():
            del sys.modules[name]
        sys.modules.update(theirs)


def _loaded() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "harness"]


if __name__ == "sitecustomize":
    _start()
