"""The text of `--help`, in one file: the place where a change of wording is reviewed.

To accept a change: python -m harness.cli.tests.test_help
"""

import inspect
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from typer.main import get_command

from harness.cli.main import app

HELP = Path(__file__).with_name("help.txt")


def commands(command: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every command with its whole name, parents first."""
    yield name, command
    for child, below in getattr(command, "commands", {}).items():
        yield from commands(below, f"{name} {child}")


def text() -> str:
    """What `--help` says of every command, without the layout, which is Typer's."""
    lines = []
    for name, command in commands(get_command(app), "harness"):
        lines += [f"## {name}", inspect.cleandoc(command.help).replace("\b\n", "")]
        for p in command.params:
            if p.param_type_name == "argument" or p.opts[0] not in COMPLETION:
                names = ", ".join((*p.opts, *p.secondary_opts))
                shown = (p.metavar or p.name) if p.param_type_name == "argument" else names
                lines.append(f"  {shown}: {p.help}")
        lines.append("")
    return "\n".join(lines)


COMPLETION = ("--install-completion", "--show-completion")


def test_help_is_the_reviewed_text() -> None:
    assert text() == HELP.read_text(encoding="utf-8")


def test_every_command_shows_a_real_invocation() -> None:
    for name, command in commands(get_command(app), "harness"):
        assert hasattr(command, "commands") or f"\n{name}" in command.help


def test_the_command_imports_nothing_slow() -> None:
    """Each would delay a newcomer's first command by a sixth of a second or more."""
    slow = {"torch", "pandas", "matplotlib", "scipy.special", "scipy.stats"}
    code = f"import sys, harness.cli.main; sys.exit(len({slow} & {{*sys.modules}}))"
    subprocess.run([sys.executable, "-c", code], check=True)


if __name__ == "__main__":
    HELP.write_text(text(), encoding="utf-8")
