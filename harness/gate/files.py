"""Records that a gate keeps as JSON files: written whole, read strictly, one a GPU and suite.

ci/baselines/GPU-5d1e.../gate.json              times of a run, to hold others against
ci/baselines/GPU-5d1e.../gate.calibration.json  what the node makes of the same code twice
ci/baselines/counters.json                      counters per step, of any CPU
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from pydantic import TypeAdapter, ValidationError

from harness.errors import StoreError
from harness.records import Environment

FOLDER = Path("ci/baselines")
SCHEMA_VERSION = 1
DAY_S = 86_400.0
SUITES = "suites"
"""Where suites usually lie: left out of the names of their records."""

Record = TypeVar("Record")


def device_id(environment: Environment) -> str:
    """What the numbers of one device go by: a GPU's UUID; a CPU's model, host and core count."""
    if environment.gpu is not None:
        return environment.gpu.uuid
    words = f"{environment.hostname}|{environment.cpu}|{environment.cpu_count}"
    return f"cpu-{hashlib.sha256(words.encode()).hexdigest()[:12]}"


def path_of(folder: Path, device: str, suite: str, kind: str = "") -> Path:
    """Where the record of a device and a suite lies; no name leads out of the folder.

    suites/gate.yaml is `gate`, big/gate.yaml `big__gate` and gate.yaml `__gate`: two suites share
    no file.
    """
    path = Path(suite)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    if path.is_relative_to(SUITES):
        parts = path.relative_to(SUITES).with_suffix("").parts
    else:
        folders = path.parent.parts or ("",)
        parts = (*folders, path.stem)
    name = "__".join(parts)
    safe = [re.sub(r"[^A-Za-z0-9_-]", "_", n) for n in (device, name)]
    return folder / safe[0] / f"{safe[1]}{kind}.json"


def moment(at: str) -> datetime:
    """A moment, ISO 8601; without an offset it is of UTC.

    Raises:
        ValueError: It is none.
    """
    found = datetime.fromisoformat(at)
    return found if found.tzinfo else found.replace(tzinfo=UTC)


def age_days(at: str) -> float:
    """Days since a moment."""
    return (datetime.now(UTC) - moment(at)).total_seconds() / DAY_S


def out_of_date(at: str, max_age_days: int) -> str:
    """What is wrong with the age of a record; empty where nothing is."""
    age = age_days(at)
    if age < -1:
        return f"is dated {at}, which is yet to come"
    return f"is {age:.0f} days old, and the policy allows {max_age_days}" * (age > max_age_days)


def write(path: Path, record: Any) -> None:
    """Write a record whole, or leave what was there.

    Raises:
        StoreError: It cannot be written.
    """
    fields = {"schema": SCHEMA_VERSION, **asdict(record)}
    text = json.dumps(fields, indent=1, ensure_ascii=False, allow_nan=False)
    # A line a list of numbers: a diff shows what changed, and no page of samples.
    text = re.sub(r"\[\s+([-\d.e+,\s]+?)\s+\]", lambda m: f"[{' '.join(m[1].split())}]", text)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_text(text + "\n", encoding="utf-8")
        draft.replace(path)
    except OSError as error:
        draft.unlink(missing_ok=True)
        raise StoreError(f"cannot write {path}: {error.strerror}") from error


def read(path: Path, kind: type[Record], remedy: str) -> Record | None:
    """The record in a file; None where there is no file.

    Raises:
        StoreError: The file is not such a record; with the remedy.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}") from error
    try:
        return parse(data, kind)
    except ValueError as error:
        problem = str(error)
    raise StoreError(f"{path} is no {kind.__name__}: {problem}", remedy)


def parse(
    data: bytes | str,
    kind: type[Record],
    current: int = SCHEMA_VERSION,
    older: Mapping[int, Callable[[dict[str, Any]], dict[str, Any]]] = MappingProxyType({}),
) -> Record:
    """The record that was written as JSON.

    Args:
        current: The schema that this reads.
        older: Older schema -> what makes today's fields of its fields.

    Raises:
        ValueError: It is none.
    """
    try:
        fields = json.loads(data)
        if not isinstance(fields, dict):
            raise ValueError("not a JSON object")
        schema = fields.pop("schema", None)
        if isinstance(schema, int) and schema in older:
            fields = older[schema](fields)
        elif schema != current:
            raise ValueError(f"schema {schema!r}, and this reads {current}")
        return TypeAdapter(kind).validate_python(fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
    except RecursionError:
        raise ValueError("nested too deeply") from None
