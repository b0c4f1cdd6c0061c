"""The JSON files of a gate: written atomically, validated when read.

ci/baselines/NVIDIA_H200/gate.json  baseline: step times of one run
ci/baselines/counters.json          counters per step, for any CPU

Each names the card it was measured on.
"""

import hashlib
import json
import os
import re
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, TypeAdapter, ValidationError
from pydantic_core import from_json

from harness.errors import StoreError
from harness.records import Environment

FOLDER = Path("ci/baselines")
SCHEMA_VERSION = 1
SUITES = "suites"
"""Usual folder of suites; file names leave it out."""

Record = TypeVar("Record")


def device_id(environment: Environment) -> str:
    """The UUID of a GPU; for a CPU a hash of its model, host and core count."""
    if environment.gpu is not None:
        return environment.gpu.uuid
    words = f"{environment.hostname}|{environment.cpu}|{environment.cpu_count}"
    return f"cpu-{hashlib.sha256(words.encode()).hexdigest()[:12]}"


def model_id(environment: Environment) -> str:
    """The name of a GPU's model; a CPU as in `device_id`."""
    return environment.gpu.name if environment.gpu else device_id(environment)


def path_of(folder: Path, device: str, suite: str, kind: str = "") -> Path:
    """The file for a device and a suite, always inside `folder` and different for each suite:
    suites/gate.yaml gives `gate`, big/gate.yaml `big__gate`, gate.yaml `__gate`."""
    path = Path(suite)
    if path.is_absolute() and path.is_relative_to(Path.cwd()):
        path = path.relative_to(Path.cwd())
    if path.is_relative_to(SUITES):
        parts = path.relative_to(SUITES).with_suffix("").parts
    else:
        parts = (*(path.parent.parts or ("",)), path.stem)
    safe = [re.sub(r"[^A-Za-z0-9_-]", "_", n) for n in (device, "__".join(parts))]
    return folder / safe[0] / f"{safe[1]}{kind}.json"


def _checked(at: str) -> str:
    datetime.fromisoformat(at)
    return at


Moment = Annotated[str, AfterValidator(_checked)]
"""ISO 8601, checked when a file is read."""


def age_days(at: str) -> float:
    """Days since then; a time without an offset is UTC."""
    then = datetime.fromisoformat(at)
    then = then if then.tzinfo else then.replace(tzinfo=UTC)
    return (datetime.now(UTC) - then) / timedelta(days=1)


def out_of_date(at: str, max_age_days: int) -> str:
    """What is wrong with the age of a record, or an empty string."""
    age = age_days(at)
    if age < -1:
        return f"is dated {at}, in the future"
    return f"is {age:.0f} days old; the policy allows {max_age_days}" * (age > max_age_days)


def write(path: Path, record: Any) -> None:
    """Write a record atomically.

    Raises:
        StoreError: The file cannot be written.
    """
    fields = {"schema": SCHEMA_VERSION, **asdict(record)}
    text = json.dumps(fields, indent=1, ensure_ascii=False, allow_nan=False)
    # One line for each list of numbers keeps diffs short.
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
    """The record in a file, or None if the file does not exist.

    Raises:
        StoreError: The file is damaged; with the remedy.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreError(f"cannot read {path}: {error.strerror}", remedy) from error
    try:
        return parse(data, kind)
    except ValueError as error:
        raise StoreError(f"{path} is not a valid {kind.__name__}: {error}", remedy) from None


def parse(data: bytes | str, kind: type[Record], schema: int = SCHEMA_VERSION) -> Record:
    """Parse and validate a record.

    Raises:
        ValueError: Not such a record.
    """
    try:
        fields = from_json(data)
        if not isinstance(fields, dict):
            raise ValueError("not a JSON object")
        if (found := fields.pop("schema", None)) != schema:
            raise ValueError(f"schema is {found!r} instead of {schema}")
        return TypeAdapter(kind).validate_python(fields)
    except ValidationError as error:
        first = error.errors()[0]
        raise ValueError(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None
