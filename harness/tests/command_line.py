"""The command `harness` in this process: another one would spend its time on imports."""

import io
import sys
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from harness.cli import main


def harness(
    *arguments: str, cwd: Path, env: Mapping[str, str | None] | None = None
) -> CompletedProcess[str]:
    """Run the command in a folder; a variable that is None is not set."""
    out, err = (io.TextIOWrapper(io.BytesIO(), "utf-8", write_through=True) for _ in range(2))
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        patch.chdir(cwd)
        patch.setattr(sys, "argv", ["harness", *arguments])
        for name, value in {"COLUMNS": "200", "TRITON_INTERPRET": None, **(env or {})}.items():
            if value is None:
                patch.delenv(name, raising=False)
            else:
                patch.setenv(name, value)
        with pytest.raises(SystemExit) as left:
            main.main()
    status = left.value.code
    assert isinstance(status, int)
    for stream in (out, err):
        stream.seek(0)
    return CompletedProcess(arguments, status, out.read(), err.read())
