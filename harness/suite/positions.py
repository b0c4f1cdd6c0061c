"""YAML 1.2 as plain values, each with its place in the file.

The values are mappings, lists, text, numbers and booleans. Tags such as `!!python/name` are
refused, and so is what could be misread: a repeated key, an empty value, NaN.
"""

import io
import math
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode
from ruamel.yaml.reader import ReaderError

from harness.errors import SuiteError
from harness.records import Scalar, as_text

Loc = tuple[str | int, ...]
"""Path of a value: keys and list indices from the root of the file."""

MAX_SHOWN = 4
"""Problems in an error after the first."""

IN_QUOTES = (
    "Use single quotes around a regular expression, and around a text that has `: ` or ` #` in it "
    "or begins with {, [, * or %."
)
NO_VALUE = "Add a value, in quotes if it begins with #, or remove the line."
_CUT = re.compile(r"[ \t]+#\S.*")
"""A comment without a space after `#`, which may be the rest of a text."""
_TAG = "tag:yaml.org,2002:"
_NULL = _TAG + "null"
_NUMBERS = {"int": "whole number of at most 63 bits", "float": "finite number"}
_TAGS = {_TAG + name for name in ("map", "seq", "str", "bool", "null", "timestamp", *_NUMBERS)}
"""Those that YAML itself gives a value. YAML 1.2 has no dates: a timestamp is text."""


@dataclass(frozen=True, slots=True)
class Problem:
    """A mistake at one place of a document."""

    loc: Loc
    text: str
    remedy: str = ""
    at_key: bool = False
    """Whether the key is wrong, not its value."""


@dataclass(frozen=True, slots=True)
class Document:
    """A YAML file as plain values with their places."""

    path: Path | str
    data: Any
    """Nested dict, list, str, int, float and bool."""
    values: dict[Loc, tuple[int, int]]
    """Line and column of each value, from 1."""
    keys: dict[Loc, tuple[int, int]]
    """Line and column of each key of a mapping."""

    def position(self, problem: Problem) -> tuple[int, int]:
        """Line and column of a problem; those of the enclosing value if its own are unknown."""
        loc = problem.loc
        if problem.at_key and loc in self.keys:
            return self.keys[loc]
        while loc not in self.values:
            loc = loc[:-1]
        return self.values[loc]

    def error(self, problems: Iterable[Problem]) -> SuiteError:
        """One error for all problems, in the order of the file."""
        first, *others = sorted(problems, key=self.position)
        remedies = [first.remedy] if first.remedy else []
        for other in others[:MAX_SHOWN]:
            line, column = self.position(other)
            remedies.append(f"also at {line}:{column}: {other.text}")
        if len(others) > MAX_SHOWN:
            remedies.append(f"and {len(others) - MAX_SHOWN} more")
        line, column = self.position(first)
        return SuiteError(self.path, first.text, "\n  ".join(remedies), line=line, column=column)


def read(
    text: str, path: Path | str, *, least: str = "See suites/smoke.yaml for an example."
) -> Document:
    """Parse one YAML document, or raise a SuiteError; `least` is the remedy for an empty file."""
    yaml, reader = YAML(typ="safe", pure=True), _NodeReader(path)
    yaml.composer.warn_double_anchors = False  # YAML 1.2 allows redefining an anchor
    try:
        root = yaml.compose(text)
        data = reader.plain(root, ()) if root is not None else None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        remedy = "Indent with spaces, not tabs." if "'\\t'" in str(error) else IN_QUOTES
        remedy = "Split the file." if "document" in str(error.problem) else remedy
        place = {"line": mark.line + 1, "column": mark.column + 1} if mark else {}
        raise SuiteError(path, f"not YAML: {error.problem}", remedy, **place) from None
    except ReaderError as error:
        character = f"#x{ord(text[error.position]):04x}"
        raise SuiteError(path, f"not text: invalid character {character}") from None
    except RecursionError:
        problem = "nested too deeply to be read, or an alias contains itself"
        raise SuiteError(path, problem) from None
    if data is None:
        raise SuiteError(path, "the file is empty", least)
    return Document(path, data, reader.values, reader.keys)


def dumped(head: str, **data: Any) -> str:
    """The text of a YAML file whose first line is a comment."""
    yaml, text = YAML(typ="safe", pure=True), io.StringIO()
    yaml.default_flow_style, yaml.width = None, 100
    yaml.sort_base_mapping_type_on_output = False  # type: ignore[assignment]
    yaml.dump(data, text)
    return f"# {head}\n{text.getvalue()}"


@dataclass(slots=True)
class _NodeReader:
    """Converts composed nodes to plain values, and records their places."""

    path: Path | str
    values: dict[Loc, tuple[int, int]] = field(default_factory=dict)
    keys: dict[Loc, tuple[int, int]] = field(default_factory=dict)

    def plain(self, node: Node, loc: Loc) -> Any:
        self.values[loc] = _place(node)
        if node.tag not in _TAGS:
            raise self._refuse(node, f"tag {node.tag} is not allowed", "Remove the tag.")
        if isinstance(node, MappingNode):
            return self._mapping(node, loc)
        if isinstance(node, ScalarNode):
            return self._scalar(node, loc)
        return [self.plain(item, (*loc, i)) for i, item in enumerate(node.value)]

    def _mapping(self, node: MappingNode, loc: Loc) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _TAG + "merge":
                raise self._refuse(key_node, "'<<' is not part of YAML 1.2", "Write out the keys.")
            if key_node.tag != _TAG + "str":
                raise self._refuse(key_node, "a key must be text", "Put it in quotes.")
            key = key_node.value
            if key in mapping:
                line, _ = self.keys[*loc, key]
                remedy = f"Remove it here or on line {line}."
                raise self._refuse(key_node, f"key {key!r} is repeated", remedy)
            self.keys[*loc, key] = _place(key_node)
            mapping[key] = self.plain(value_node, (*loc, key))
        return mapping

    def _scalar(self, node: ScalarNode, loc: Loc) -> Scalar:
        if node.tag == _NULL:
            name = next((step for step in reversed(loc) if isinstance(step, str)), "the file")
            raise self._refuse(node, f"{name} has no value", NO_VALUE)
        if node.style is None and (cut := _CUT.match(node.end_mark.buffer, node.end_mark.pointer)):
            raise self._refuse(node, f"'{cut[0].strip()}' is a comment here", IN_QUOTES)
        try:
            return _convert(str(node.tag), node.value)
        except ValueError as error:
            raise self._refuse(node, str(error), "Put it in quotes if it is text.") from None

    def _refuse(self, node: Node, problem: str, remedy: str) -> SuiteError:
        line, column = _place(node)
        return SuiteError(self.path, problem, remedy, line=line, column=column)


def _place(node: Node) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1


def scalar(text: str) -> Scalar:
    """The value that a word has in a suite: 512, 0.5, true, or text; ValueError for NaN or null."""
    tag = str(YAML(typ="safe", pure=True).resolver.resolve(ScalarNode, text, (True, False)))
    if tag == _NULL:
        raise ValueError(f"{text!r} is not a value")
    return _convert(tag, text)


def _convert(tag: str, text: str) -> Scalar:
    """The value of a plain word; ValueError for a number that is too large or not finite."""
    kind = tag.removeprefix(_TAG)
    if kind == "bool" and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if kind not in _NUMBERS:
        return text
    with suppress(ValueError):  # .inf and .nan are no number here
        number = int(text, base=0) if kind == "int" else float(text.replace("_", ""))
        if abs(number) < (2**63 if kind == "int" else math.inf):
            return number
    raise ValueError(f"{text} is not a {_NUMBERS[kind]}")


def show(value: Scalar) -> str:
    """A value as written in a suite: text in quotes, `true`, 512."""
    return as_text(value) if isinstance(value, bool) else repr(value)


def nearest(value: Scalar, valid: Sequence[Scalar]) -> str:
    """A remedy: the valid value nearest to a wrong one, and the other valid ones."""
    if not valid:
        return ""
    if isinstance(value, int | float) and all(isinstance(v, int | float) for v in valid):
        close = [min(valid, key=lambda v: abs(float(v) - value))]
    else:
        by_text = {str(v).lower(): v for v in valid}
        close = [by_text[t] for t in get_close_matches(str(value).lower(), by_text, n=1)]
    shown = ", ".join(show(v) for v in valid[:16])
    shown += f" and {len(valid) - 16} more" if len(valid) > 16 else ""
    return f"Did you mean {show(close[0])}? Valid: {shown}." if close else f"Valid: {shown}."
