"""One case of the `attention` workload, read from its axes."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from harness.records import Scalar
from nsa import roofline
from nsa.config import BRANCHES as GATED
from nsa.config import ROUTES, NSAConfig, Routes
from nsa.flags import Flags
from suites.axes import DENSE, DTYPES, Axes, AxisError
from suites.operators.found import DEFINITIONS, OPERATORS
from suites.operators.protocol import DENSE as DENSELY
from suites.operators.protocol import MEANS, PAPER, Definition, Operator
from suites.selections import SELECTIONS, TRAINED_HEADS, Selection

BRANCHES: tuple[roofline.Part, ...] = ("whole", "compress", "scores", "select", "window")
_READ = {
    "whole": ("q", "k_cmp", "v_cmp", "k_sel", "v_sel", "k_win", "v_win", "gates"),
    "compress": ("q", "k_cmp", "v_cmp"),
    "scores": ("q", "k_cmp"),
    "select": ("q", "k_sel", "v_sel"),
    "window": ("q", "k_win", "v_win"),
    "dense": ("q", "k_sel", "v_sel"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPlan:
    """One case of the `attention` workload."""

    provider: str
    B: int
    T: int
    HQ: int
    HKV: int
    Dk: int
    Dv: int
    dtype: torch.dtype
    backward: bool
    branch: roofline.Part
    selection: Selection
    config: NSAConfig
    routes: Routes
    operator: Operator | None
    """Of another project, if it is the provider."""
    definition: Definition

    @property
    def dense(self) -> bool:
        """Whether the provider computes plain causal attention."""
        return self.definition is DENSELY

    @property
    def selects(self) -> bool:
        """Whether the computation under test selects blocks by the paper's rule."""
        by_rule = self.definition.choose is None and not self.dense
        return self.branch in ("whole", "scores") and by_rule

    @property
    def reads_blocks(self) -> bool:
        """Whether the computation under test attends to selected blocks, or selects them."""
        chooses = self.definition.choose is not None
        return self.selects or self.branch == "select" or chooses

    @property
    def parts(self) -> tuple[str, ...]:
        """Attentions that are computed: those whose outputs the gates weigh, or one."""
        if self.definition.compute:
            return ("select",)
        one = "dense" if self.dense else self.branch
        return GATED if one == "whole" else (one,)

    @property
    def reads(self) -> tuple[str, ...]:
        """Inputs of the computation under test: those it has gradients for."""
        if self.definition.reads and self.branch == "whole":
            return self.definition.reads
        return _READ["dense" if self.dense else self.branch]

    @classmethod
    def read(cls, provider: str, axes: Mapping[str, Scalar], flags: Flags) -> "AttentionPlan":
        """Check the axes of one case.

        The provider is a route of selected attention, or for branch=whole of the other parts,
        while the rest follows the NSA_* flags; or `triton` or `reference`, which is all of them;
        or a route of the one branch under test; or dense attention; or one of suites.operators.
        `definition` is what it must compute: by default what it claims.
        """
        given = Axes("attention", axes, flags)
        routes = dict.fromkeys(route for part in ROUTES.values() for route in part)
        given.provider(provider, (*routes, *DENSE, *OPERATORS))
        sizes = given.sizes()
        branch = given.word("branch", BRANCHES, "whole")
        own_routes = _routes(provider, branch, given)
        operator, claimed = OPERATORS.get(provider), _claimed(provider, branch)
        definition = DEFINITIONS[given.word("definition", DEFINITIONS, claimed.name)]
        ours_too = definition is MEANS and branch == "whole" and claimed is PAPER and not operator
        if definition is not claimed and not ours_too:
            raise AxisError(f"attention: {provider} computes the definition {claimed.name!r} alone")
        plan = cls(
            provider=provider,
            B=given.integer("batch", 1),
            T=given.integer("seq_len"),
            HQ=given.integer("q_heads"),
            HKV=given.integer("kv_heads"),
            Dk=given.integer("head_dim_qk"),
            Dv=given.integer("head_dim_v"),
            dtype=DTYPES[given.word("dtype", DTYPES)],
            backward=given.word("pass", ("forward", "forward+backward")) != "forward",
            branch=branch,
            selection=given.word("selection", SELECTIONS, "real"),
            config=definition.config(sizes),
            routes=own_routes,
            operator=operator,
            definition=definition,
        )
        given.finish()
        if plan.selection != "real" and branch != "select":
            raise AxisError(
                f"attention: selection={plan.selection} needs branch=select; the rest of the "
                "operator selects for itself"
            )
        if plan.selection == "trained" and plan.HKV > TRAINED_HEADS:
            raise AxisError(
                f"attention: kv_heads={plan.HKV} with selection=trained, whose model has "
                f"{TRAINED_HEADS} in all its layers"
            )
        if branch == "scores" and plan.backward:
            raise AxisError("attention: selection has no gradient; branch=scores is forward only")
        return plan


def _claimed(provider: str, branch: roofline.Part) -> Definition:
    """What the provider claims to compute."""
    if provider in DENSE:
        return DENSELY
    return OPERATORS[provider].parts[branch].definition if provider in OPERATORS else PAPER


def _routes(provider: str, branch: roofline.Part, given: Axes) -> Routes:
    """The route of each part; an AxisError where the provider has no such branch.

    Flags choose the parts that run and that the provider leaves open.
    """
    own = _own_routes(provider, branch)
    parts = {"whole": tuple(ROUTES), "select": ("scores", "select")}.get(branch, (branch,))
    left = [part for part in parts if part not in own]
    if not left:
        given.unrouted(f"{provider} sets every route that runs")
    else:
        given.every_branch()
    return Routes(**own, **{part: given.flags.route(part) for part in left})


def _own_routes(provider: str, branch: roofline.Part) -> dict[str, str]:
    """Parts of the operator, and the route that the provider is for each."""
    none = {part: getattr(Routes(), part) for part in ROUTES}
    if provider in DENSE:
        if branch != "whole":
            raise AxisError(f"attention: dense attention has no branch {branch!r}; only whole")
        return none
    if provider in OPERATORS:
        if branch not in OPERATORS[provider].parts:
            known = ", ".join(OPERATORS[provider].parts)
            raise AxisError(f"attention: {provider} has no branch {branch!r}; only {known}")
        return none
    if provider in ("triton", "reference"):
        return dict.fromkeys(ROUTES, provider)
    if provider in ROUTES["select"]:
        return {"select": provider}
    if branch == "whole":
        return {part: provider for part, routes in ROUTES.items() if provider in routes}
    if provider not in ROUTES.get(branch, ()):
        parts = [part for part, routes in ROUTES.items() if provider in routes]
        raise AxisError(f"attention: {provider} has no branch {branch!r}; only {', '.join(parts)}")
    return {branch: provider}
