"""The form of what a suite requires of the machine."""

from collections.abc import Mapping
from typing import Annotated, Literal

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from pydantic import AfterValidator, Field

from harness.records import Scalar
from harness.suite.fields import Form, Name, OneOrList, Positive, Some, Text, VariableName, wrong


def _bound(text: str) -> str:
    if text[:1] in "<>=!~":
        try:
            SpecifierSet(text)
        except InvalidSpecifier:
            raise wrong("must be a bound such as '>=2' or '>=2,<3'") from None
    return text


Bound = Annotated[Text, AfterValidator(_bound)]
"""A bound such as `>=2`, or a pattern such as `580.*`."""


class RequiresModel(Form):
    """What the machine must have before the first case; else the run ends there, with exit status
    2. Checked by `harness run --dry-run` too."""

    gpu: OneOrList[Text, Some[Text]] | None = None
    """Pattern of the GPU's name, or a list: `H200` means `*H200*`."""
    gpus: Annotated[int, Field(ge=1)] | None = None
    """GPUs that a worker must see."""
    driver: Bound | None = None
    """Of its version: `>=535`, or a pattern such as `580.*`."""
    gpu_free_bytes: Positive | None = None
    """Free memory of the GPU before the first case."""
    packages: dict[Name, Bound] = {}
    """Installed package -> its version: `>=2`, or `*` for any. Also python, cuda and cudnn."""
    torch: dict[Name, Scalar] = {}
    """Settings of torch, as a workload finds them: allow_tf32_matmul, num_threads and others."""
    variables: dict[VariableName, Text] = {}
    """Environment variable of the run -> pattern of its value; `*` if it must be set."""
    else_: Literal["note"] | None = Field(default=None, alias="else")
    """`note`: without it the suite goes on, and the report says so."""

    def stated(self) -> Mapping[str, Scalar]:
        """Key, or `key.name` -> what is required."""
        flat: dict[str, Scalar] = {}
        for key, value in self.model_dump(exclude={"else_"}, exclude_none=True).items():
            if isinstance(value, dict):
                flat |= {f"{key}.{name}": one for name, one in value.items()}
            else:
                flat[key] = "|".join(value) if isinstance(value, list) else value
        return flat
