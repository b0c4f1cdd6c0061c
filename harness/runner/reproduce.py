"""A script that repeats what a case's worker did, without the harness."""

import os
import pprint
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

from harness.records import INTERPRETER, VARIABLE_PREFIXES, Case, Evidence, Measurement, Outcome

NAME = "reproduce.py"
MORE_RUNS = 50
"""Steps that the script makes beyond those that the worker finished."""

_SCRIPT = '''\
"""{title}

{outcome}: {detail}

Builds the case and runs it, without a watchdog: {interpreter} {name} [RUNS]
A step that takes longer than STALL_S prints its stacks and ends the script.
"""

import faulthandler
import os
import sys
import time
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDER = (HERE / {folder!r}).resolve()  # where the harness was started
PLACES = {places}  # where its modules were found, from FOLDER
VARIABLES = {variables}
FACTORY = {factory!r}
PROVIDER = {provider!r}
AXES = {axes}
CHECK = {check!r}  # compare with the reference first, as the suite asks
FRESH = {fresh!r}  # write other inputs before each step, if the workload can
STALL_S = {stall_s!r}
RUNS = int(sys.argv[1]) if len(sys.argv) > 1 else {runs!r}


def main() -> None:
    faulthandler.enable(all_threads=True)
    os.environ.update(VARIABLES)  # before torch is loaded, which reads some of them
    os.chdir(FOLDER)
    sys.path[:0] = [str(FOLDER / place) for place in PLACES]
    import torch

    from harness.measure import accuracy

    module, _, function = FACTORY.partition(":")
    workload = getattr(import_module(module), function)(PROVIDER, AXES)
    print("built", flush=True)
    if CHECK:
        print(accuracy.compare(workload), flush=True)
    for step in range(RUNS):
        if FRESH and step and workload.fresh:
            workload.fresh(step)
        faulthandler.dump_traceback_later(STALL_S, exit=True)
        start = time.perf_counter()
        output = workload.run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        print(f"run {{step}}: {{time.perf_counter() - start:.6f}} s", flush=True)
        accuracy.require_finite_output(output)
        del output
    faulthandler.cancel_dump_traceback_later()
    print(f"{{RUNS}} runs finished", flush=True)


if __name__ == "__main__":
    main()
'''


_PROGRAM_SCRIPT = '''\
"""{title}

{outcome}: {detail}

Starts the program as the harness did, without a watchdog: {interpreter} {name}
"""

import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
FOLDER = (HERE / {folder!r}).resolve()  # where the harness was started
CWD = {cwd!r}  # from FOLDER
FIRST = {first}  # where it finds modules first, from FOLDER
VARIABLES = {variables}
COMMAND = {argv}
RANKS = {ranks!r}  # 0: one process without torchrun's variables

if __name__ == "__main__":
    env = {{**os.environ, **VARIABLES}}
    places = [*(str(FOLDER / place) for place in FIRST), VARIABLES.get("PYTHONPATH", "")]
    env["PYTHONPATH"] = os.pathsep.join(filter(None, places))
    command = [sys.executable if word == "{python}" else word for word in COMMAND]
    if RANKS:
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={{RANKS}}"]
        command = [sys.executable, *launch, "--no-python", *command]
    sys.exit(subprocess.run(command, cwd=FOLDER / CWD, env=env, check=False).returncode)
'''


def script(case: Case, measurement: Measurement, folder: Path, first: Sequence[str]) -> str:
    """The text of the script, which will be in `folder`; modules are searched first in `first`."""
    here = Path.cwd()
    evidence = measurement.evidence or Evidence()
    inherited = {k: v for k, v in os.environ.items() if k.startswith(VARIABLE_PREFIXES)}
    head = {
        "title": _in_docstring(f"Case {case.case_id}, process {measurement.process}."),
        "outcome": measurement.outcome,
        "detail": _in_docstring(measurement.detail),
        "name": NAME,
        "interpreter": shlex.quote(_in_docstring(sys.executable)),
        "folder": _relative(here, folder.resolve(), within=here),
        "variables": pprint.pformat({**inherited, **case.env}),
    }
    if case.program is not None:
        return _PROGRAM_SCRIPT.format(
            **head,
            cwd=case.program.cwd,
            first=pprint.pformat([_relative(Path(p), here, within=here) for p in first]),
            ranks=case.program.world_size,
            argv=pprint.pformat(list(case.program.argv)),
            python=INTERPRETER,
        )
    hung = measurement.outcome is Outcome.HANG
    return _SCRIPT.format(
        **head,
        places=pprint.pformat([_relative(p, here, within=here) for p in _places(here, first)]),
        factory=case.factory,
        provider=case.provider,
        axes=pprint.pformat(dict(case.axes)),
        check=case.settings.accuracy,
        fresh=case.settings.rotate_inputs == 1,
        stall_s=evidence.stall_limit_s if hung else case.settings.timeout_s,
        runs=(evidence.steps or 0) + MORE_RUNS,
    )


def _places(here: Path, first: Sequence[str]) -> list[Path]:
    """The folders of `first`, and those on sys.path that another interpreter would not search."""
    own = {Path(p).resolve() for p in (sys.prefix, sys.base_prefix)}
    found = dict.fromkeys(Path(p).resolve() for p in sys.path if p and Path(p).is_dir())
    foreign = [p for p in found if not any(p.is_relative_to(prefix) for prefix in own)]
    before = [Path(folder).resolve() for folder in first]
    return [*dict.fromkeys((*before, *(p for p in foreign if p != here), here))]


def _relative(place: Path, start: Path, *, within: Path) -> str:
    """The path to a place, relative if both are inside a folder, which can then be moved."""
    inside = place.is_relative_to(within) and start.is_relative_to(within)
    return os.path.relpath(place, start) if inside else str(place)


def _in_docstring(text: str) -> str:
    """Text that neither ends the docstring nor is an escape in it."""
    return text.encode("ascii", "replace").decode().replace("\\", "/").replace('"', "'")
