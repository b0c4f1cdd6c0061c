"""YAML 1.2 as plain values, each with its place in the file.

The values are mappings, lists, text, numbers and booleans. Tags such as `!!python/name` are
refused, and so is what could be misread: a repeated key, an empty value, NaN.
"""

import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import lru_cache
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError
from ruamel.yaml.nodes import MappingNode, Node, ScalarNode
from ruamel.yaml.reader import ReaderError

from harness.errors import SuiteError
from harness.records import Scalar

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
        if problem.at_key and problem.loc in self.keys:
            return self.keys[problem.loc]
        loc = problem.loc
        while loc not in self.values:
            loc = loc[:-1]
        return self.values[loc]

    def error(self, problems: Iterable[Problem]) -> SuiteError:
        """One error for all problems, in the order of the file."""
        first, *others = sorted(problems, key=self.position)
        line, column = self.position(first)
        also = [
            f"also at {'{}:{}'.format(*self.position(p))}: {p.text}" for p in others[:MAX_SHOWN]
        ]
        if len(others) > MAX_SHOWN:
            also.append(f"and {len(others) - MAX_SHOWN} more")
        remedy = "\n  ".join([first.remedy, *also] if first.remedy else also)
        return SuiteError(self.path, first.text, remedy, line=line, column=column)


def read(
    text: str, path: Path | str, *, least: str = "See suites/smoke.yaml for an example."
) -> Document:
    """Parse one YAML document.

    Args:
        least: The remedy for an empty file.

    Raises:
        SuiteError: The text is not YAML, is empty, or contains something that is refused.
    """
    reader = _NodeReader(path)
    try:
        root = _composed(text)
        data = reader.plain(root, ()) if root is not None else None
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        remedy = "Indent with spaces, not tabs." if "'\\t'" in str(error) else IN_QUOTES
        remedy = "Split the file." if "document" in str(error.problem) else remedy
        raise SuiteError(
            path,
            f"not YAML: {error.problem}",
            remedy,
            line=mark.line + 1 if mark else 0,
            column=mark.column + 1 if mark else 0,
        ) from None
    except ReaderError as error:
        before = text[: error.position]
        raise SuiteError(
            path,
            f"not text: invalid character #x{ord(text[error.position]):04x}",
            line=before.count("\n") + 1,
            column=len(before) - before.rfind("\n"),
        ) from None
    except RecursionError:
        raise SuiteError(path, "nested too deeply to be read") from None
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


@lru_cache(maxsize=32)
def _composed(text: str) -> Node | None:
    """The nodes of a document. Most of the time of reading a suite is spent here, and suites that
    name each other are read many times."""
    yaml = YAML(typ="safe", pure=True)
    yaml.composer.warn_double_anchors = False  # YAML 1.2 allows redefining an anchor
    root: Node | None = yaml.compose(text)
    return root


@dataclass(slots=True)
class _NodeReader:
    """Converts composed nodes to plain values, and records their places."""

    path: Path | str
    values: dict[Loc, tuple[int, int]] = field(default_factory=dict)
    keys: dict[Loc, tuple[int, int]] = field(default_factory=dict)
    open: list[Node] = field(default_factory=list)
    """Mappings and lists that are being read, outermost first."""

    def plain(self, node: Node, loc: Loc) -> Any:
        if node in self.open:
            raise self._refuse(node, "an alias contains itself")
        self.values[loc] = _place(node)
        if isinstance(node, ScalarNode):
            return self._scalar(node, loc)
        kind = "map" if isinstance(node, MappingNode) else "seq"
        if node.tag != _TAG + kind:
            raise self._refuse(node, f"tag {node.tag} is not allowed", "Remove the tag.")
        self.open.append(node)
        value = (
            self._mapping(node, loc)
            if isinstance(node, MappingNode)
            else [self.plain(item, (*loc, i)) for i, item in enumerate(node.value)]
        )
        self.open.pop()
        return value

    def _mapping(self, node: MappingNode, loc: Loc) -> dict[str, Any]:
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            if key_node.tag == _TAG + "merge":
                raise self._refuse(key_node, "'<<' is not part of YAML 1.2", "Write out the keys.")
            if key_node.tag != _TAG + "str" or not isinstance(key_node, ScalarNode):
                raise self._refuse(key_node, "a key must be text", "Put it in quotes.")
            key = key_node.value
            if key in mapping:
                line, _ = self.keys[*loc, key]
                raise self._refuse(
                    key_node, f"key {key!r} is repeated", f"Remove it here or on line {line}."
                )
            self.keys[*loc, key] = _place(key_node)
            mapping[key] = self.plain(value_node, (*loc, key))
        return mapping

    def _scalar(self, node: ScalarNode, loc: Loc) -> Scalar:
        tag = str(node.tag)
        if tag == _NULL:
            name = next((step for step in reversed(loc) if isinstance(step, str)), "the file")
            raise self._refuse(node, f"{name} has no value", NO_VALUE)
        if tag not in _SCALARS:
            raise self._refuse(node, f"tag {tag} is not allowed", "Remove the tag.")
        if node.style is None and (cut := _CUT.match(node.end_mark.buffer, node.end_mark.pointer)):
            raise self._refuse(node, f"'{cut[0].strip()}' is a comment here", IN_QUOTES)
        try:
            return _convert(tag, node.value)
        except ValueError as error:
            raise self._refuse(node, str(error), "Put it in quotes if it is text.") from None

    def _refuse(self, node: Node, problem: str, remedy: str = "") -> SuiteError:
        line, column = _place(node)
        return SuiteError(self.path, problem, remedy, line=line, column=column)


def _place(node: Node) -> tuple[int, int]:
    return node.start_mark.line + 1, node.start_mark.column + 1


def scalar(text: str) -> Scalar:
    """The value that a word of a command line has in a suite: 512, 0.5, true, or text.

    Raises:
        ValueError: The word means null, NaN or infinity.
    """
    tag = str(YAML(typ="safe", pure=True).resolver.resolve(ScalarNode, text, (True, False)))
    if tag == _NULL:
        raise ValueError(f"{text!r} is not a value")
    return _convert(tag, text) if tag in _SCALARS else text


def _convert(tag: str, text: str) -> Scalar:
    kind, convert = _SCALARS[tag]
    try:
        return convert(text)
    except (KeyError, ValueError):
        raise ValueError(f"{text} is not a {kind}") from None


def _boolean(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


def _whole(text: str) -> int:
    if abs(number := int(text, base=0)) >= 2**63:
        raise ValueError(text)
    return number


def _finite(text: str) -> float:
    if not math.isfinite(number := float(text.replace("_", ""))):
        raise ValueError(text)
    return number


_SCALARS: Mapping[str, tuple[str, Callable[[str], Scalar]]] = {
    _TAG + "str": ("text", str),
    _TAG + "timestamp": ("text", str),  # YAML 1.2 has no dates
    _TAG + "bool": ("boolean", _boolean),
    _TAG + "int": ("whole number of at most 63 bits", _whole),
    _TAG + "float": ("finite number", _finite),
}


def show(value: Scalar) -> str:
    """A value as written in a suite: text in quotes, `true`, 512."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value)


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
