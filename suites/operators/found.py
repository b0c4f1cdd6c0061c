"""All operators: those of the files in this folder that have an OPERATOR."""

import importlib
from collections.abc import Mapping
from pathlib import Path

from suites.operators.protocol import MEANS, PAPER, Definition, Operator

_FORM = {"__init__", "found", "packed", "protocol"}

OPERATORS: Mapping[str, Operator] = {
    operator.name: operator
    for operator in (
        importlib.import_module(f"suites.operators.{path.stem}").OPERATOR
        for path in sorted(Path(__file__).parent.glob("*.py"))
        if path.stem not in _FORM
    )
}
"""By the name of the provider."""

DEFINITIONS: Mapping[str, Definition] = {
    definition.name: definition
    for definition in (
        PAPER,
        MEANS,
        *(part.definition for o in OPERATORS.values() for part in o.parts.values()),
    )
}
"""By the value of the axis `definition`."""
