"""Shared by the forms of YAML files: names, values, messages, JSON Schema.

A form is a pydantic model of a file that people write: a suite, or the policy of a gate.
"""

import ast
import dataclasses
import inspect
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import pairwise
from typing import Annotated, Any, ClassVar, TypeVar, get_type_hints

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    GetPydanticSchema,
    PlainValidator,
    Tag,
    ValidationError,
    create_model,
    model_validator,
)
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, ErrorDetails, PydanticCustomError

from harness.records import Match, Outcome, Scalar
from harness.suite.positions import Document, Problem, nearest, show

NAME = r"^[A-Za-z0-9][A-Za-z0-9._+-]*$"
AXIS = r"^([a-z][a-z0-9_]*|[A-Z][A-Z0-9_]*)$"
VARIABLE = r"^[A-Za-z_][A-Za-z0-9_]*$"
FACTORY = r"^[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*$"
SUBJECT = r"^[A-Za-z0-9][A-Za-z0-9 ._+-]{0,79}$"

_PATTERNS = {
    NAME: "letters, digits and . _ + -, starting with a letter or digit",
    AXIS: "lower_case, or UPPER_CASE for an environment variable",
    VARIABLE: "letters, digits and _, not starting with a digit",
    FACTORY: "package.module:function",
    SUBJECT: "at most 80 letters, digits, spaces and . _ + -: it names the file of the report",
}
_TYPES = {
    "model_type": "must be a mapping of `key: value` lines",
    "dict_type": "must be a mapping of `key: value` lines",
    "list_type": "must be a list",
    "string_type": "must be text",
    "int_type": "must be a whole number",
    "float_type": "must be a number",
    "bool_type": "must be true or false",
}
"""Pydantic's error types, for authors of suites."""


def wrong(text: str, *, key: str = "", remedy: str = "") -> PydanticCustomError:
    """The error of a validator; `key` is the wrong key of a mapping."""
    return PydanticCustomError("suite", "{text}", {"text": text, "key": key, "remedy": remedy})


def _scalar(value: Any) -> Scalar:
    if isinstance(value, bool | int | float | str):
        return value
    raise wrong("must be one value: a number, text, true or false")


def _not_ok(outcome: Outcome) -> Outcome:
    if outcome is Outcome.OK:
        raise wrong("names ok, which is always allowed", remedy="Remove it.")
    if outcome is Outcome.IMPOSSIBLE:
        raise wrong("names impossible, a number that means nothing", remedy="Remove it.")
    return outcome


def _match(criteria: Mapping[str, Any]) -> Match:
    listed = {k: tuple(v) if isinstance(v, list) else (v,) for k, v in criteria.items()}
    return Match(criteria=listed)


def read_as(kind: Any) -> GetPydanticSchema:
    """A record in a form is read as something else."""
    return GetPydanticSchema(lambda _, handler: handler.generate_schema(kind))


One = TypeVar("One")
Many = TypeVar("Many")
Item = TypeVar("Item")
OneOrList = Annotated[
    Annotated[One, Tag("one")] | Annotated[Many, Tag("list")],
    Discriminator(lambda value: "list" if isinstance(value, list) else "one"),
]
Value = Annotated[
    bool | int | float | str,
    PlainValidator(_scalar, json_schema_input_type=bool | int | float | str),
]
Some = Annotated[list[Item], Field(min_length=1)]
Values = OneOrList[Value, Some[Value]]
Name = Annotated[str, Field(pattern=NAME)]
AxisName = Annotated[str, Field(pattern=AXIS)]
VariableName = Annotated[str, Field(pattern=VARIABLE)]
Matching = Annotated[Match, read_as(Annotated[dict[str, Values], AfterValidator(_match)])]
"""Axis (or `workload`, `provider`) -> its value, or a list of allowed values."""
SomeMatching = Annotated[
    Match, read_as(Annotated[dict[str, Values], Field(min_length=1), AfterValidator(_match)])
]
AllowedOutcome = Annotated[Outcome, Field(strict=False), AfterValidator(_not_ok)]
Text = Annotated[str, Field(min_length=1)]


def one_or_list(one: Any) -> BeforeValidator:
    """A list in a form, for which a file may have its only item."""
    return BeforeValidator(
        lambda given: given if isinstance(given, list) else [given],
        json_schema_input_type=one | list[one],
    )


def text_as(key: str, mapping: Any) -> BeforeValidator:
    """A mapping in a form, for which a file may have the text of one of its keys."""
    return BeforeValidator(
        lambda given: {key: given} if isinstance(given, str) else given,
        json_schema_input_type=Text | mapping,
    )


Positive = Annotated[float, Field(gt=0)]


class Form(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, defer_build=True)
    _record: ClassVar[Any] = None  # whose fields it has, if any

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """With the texts below the fields. Only a schema needs them: to read them takes a third of
        the time in which the command starts."""
        made = handler(core_schema)
        properties = handler.resolve_ref_schema(made)["properties"]
        for name, field in cls.model_fields.items():
            if about := _about(cls, name.removeprefix("its_"), field.default):
                properties[field.alias or name].setdefault("description", about)
        return made

    @model_validator(mode="before")
    @classmethod
    def _known_keys(cls, data: Any) -> Any:
        """Refuse an unknown key before pydantic does, with the nearest valid one."""
        known = [f.alias or name for name, f in cls.model_fields.items()]
        for key in data if isinstance(data, dict) else ():
            if key not in known:
                of = {"key": key, "remedy": nearest(key, known)}
                raise PydanticCustomError("unknown_key", "unknown key '{key}'", of)
        return data


_IN_A_FILE: dict[Any, Any] = {
    str: Text,
    Match: Matching,
    Match | None: Matching | None,
    tuple[str, ...]: list[Text],
}
"""Type in a record -> in a form, where a text is not empty."""


def form_of(record: type[Any], leave: Collection[str] = (), **kinds: Any) -> Any:
    """A form with the fields of a record, their defaults and their descriptions.

    A field such as `with_` has the key `with`; those to `leave` are not in a file; `kinds` are what
    a file may have in a field, if its type does not say it.
    """
    types = {k: _IN_A_FILE.get(v, v) for k, v in get_type_hints(record).items()} | kinds
    fields: dict[str, Any] = {}
    for field in (one for one in dataclasses.fields(record) if one.name not in leave):
        default: dict[str, Any] = {}
        if field.default_factory is not dataclasses.MISSING:
            default = {"default_factory": field.default_factory}
        elif field.default is not dataclasses.MISSING:
            default = {"default": field.default}
        info = Field(alias=field.name.rstrip("_"), **default)
        name = f"its_{field.name}" if hasattr(Form, field.name) else field.name
        fields[name] = (types[field.name], info)
    made: Any = create_model(record.__name__, __base__=Form, __doc__=record.__doc__, **fields)
    made._record = record
    return made


def _about(form: type[Form], name: str, default: Any) -> str:
    """The text below a field in the form or its record, with the default that only code states."""
    for base in form.__mro__[: form.__mro__.index(Form)]:
        record = vars(base).get("_record")
        written = getattr(sys.modules[base.__module__], base.__name__, None) is base
        if about := _descriptions(record or base).get(name) if record or written else None:
            plain = record and isinstance(default, bool | int | float)
            return f"{about} Default {show(default).removesuffix('.0')}." if plain else about
    return ""


@cache
def _descriptions(of: type[Any]) -> Mapping[str, str]:
    """Field of a class -> the text below it."""
    (parsed,) = ast.parse(inspect.getsource(of)).body
    assert isinstance(parsed, ast.ClassDef)
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(parsed.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(text.value.value, str)
    }


def reads(record: type[Any], leave: Sequence[str] = (), **kinds: Any) -> GetPydanticSchema:
    """In `Annotated[record, reads(record)]`: a file has the form of the record there."""

    def made(form: Form) -> Any:
        given = {k.removeprefix("its_"): tuple(v) if isinstance(v, list) else v for k, v in form}
        return record(**given)

    return read_as(Annotated[form_of(record, leave, **kinds), AfterValidator(made)])


AnyForm = TypeVar("AnyForm", bound=Form)


def checked(model: type[AnyForm], document: Document) -> AnyForm:
    """The document as a model; a SuiteError names the places of the first problems."""
    try:
        return model.model_validate(document.data)
    except ValidationError as error:
        problems = [problem(e, document.data) for e in error.errors(include_url=False)]
        raise document.error(problems) from None


def schema_of(model: type[Form]) -> dict[str, Any]:
    """The JSON Schema of a file, for editors. It also allows null, which `read` refuses."""
    schema = model.model_json_schema(by_alias=True)
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def problem(error: ErrorDetails, data: Any) -> Problem:
    """A pydantic error as a message for the author, with its place in the file."""
    context: Mapping[str, Any] = error.get("ctx", {})
    loc, value = _place([*error["loc"], context.get("key", "")], data)
    remedy = context.get("remedy", "")
    name = _name(loc)
    at_key = error["loc"][-1:] == ("[key]",)
    match kind := error["type"]:
        case "unknown_key":
            return Problem(loc, error["msg"], remedy, at_key=True)
        case "suite":
            return Problem(loc, f"{name} {error['msg']}", remedy, at_key)
        case "missing":
            return Problem(loc, f"{error['loc'][-1]} is missing")
        case "string_pattern_mismatch":
            text = f"{show(loc[-1] if at_key else value)} is not a valid name"
            return Problem(loc, text, f"Use {_PATTERNS[context['pattern']]}.", at_key=at_key)
        case "enum":
            valid = [outcome.value for outcome in Outcome if outcome is not Outcome.OK]
            given = str(loc[-1] if at_key else value)
            return Problem(loc, f"{show(given)} is not an outcome", nearest(given, valid), at_key)
        case "too_short" | "string_too_short":
            least = context["min_length"]
            text = "must not be empty" if least == 1 else f"needs at least {least} items"
            return Problem(loc, f"{name} {text}")
    text = f"{name} {_TYPES.get(kind) or re.sub(r'^Input should', 'must', error['msg'])}"
    if isinstance(value, bool | int | float | str) and "not " not in text:
        text += f", not {show(value)}"
    if kind == "string_type":
        remedy = "Put it in quotes."
    return Problem(loc, text, remedy, at_key)


def _place(steps: Sequence[str | int], data: Any) -> tuple[tuple[str | int, ...], Any]:
    """The part of pydantic's location that exists in the file, and the value there."""
    loc: list[str | int] = []
    for step in steps:
        if not isinstance(data, Scalar):
            with suppress(LookupError, TypeError):
                data = data[step]
                loc.append(step)
    return tuple(loc), data


def _name(loc: Sequence[str | int]) -> str:
    """A short name of a place, such as `axes.seq_len[1]`."""
    name = ""
    for step in loc:
        if isinstance(step, int):
            name += f"[{step}]"
        else:
            name = f"{name}.{step}" if name and not name.endswith("]") else step
    return name or "the suite"
