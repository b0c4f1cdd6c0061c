"""How the step time grows along an axis.

step_s = c * axis^exponent, fitted on logarithms, so that every point weighs by its relative
error and the longest sequence does not decide alone. A timeout is a censored point: the time is
known to be at least its bound, which is less than a time and more than nothing.

Sources: Tobin 1958 (regression with a censored response); Olsen 1978, "Note on the uniqueness
of the maximum likelihood estimator for the Tobit model", whose parameters make it concave.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr

from harness.analysis.statistics import t_factor
from harness.records import Case, CaseSummary, Estimate, Outcome, Scalar

MIN_POINTS = 3
"""Fewer uncensored, distinct points leave no residual to judge a fit by."""
FLAT = 0.1
"""Exponent under which, in absolute value, the axis is suspected not to reach the workload."""
MIN_SCATTER = 1e-3
"""Least relative scatter the censored fit assumes: without one, points that happen to lie on a
line would have unbounded likelihood. Processes of one case differ by more."""

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One case on the curve; it has a time, or a bound, or (not measured) neither."""

    case_id: str
    x: float
    step_s: Estimate | None = None
    lower_bound_s: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalingFit:
    """The power law of a group of cases that differ in one axis only."""

    axis: str
    group: str
    """Workload, provider and the other swept axes: the case id without this axis."""
    workload: str
    points: tuple[Point, ...]
    """In the order of the axis."""
    exponent: Estimate | None = None
    """None where `reason` says why there is no fit."""
    coefficient: float | None = None
    """c in step_s = c * axis^exponent, in seconds."""
    reason: str = ""
    note: str = ""
    """What is suspicious about the curve."""

    @property
    def censored(self) -> int:
        return sum(p.step_s is None and p.lower_bound_s is not None for p in self.points)

    def at(self, x: float) -> float:
        """Fitted step time in seconds.

        Raises:
            ValueError: Without a fit.
        """
        if self.exponent is None or self.coefficient is None:
            raise ValueError(f"{self.group}: {self.reason}")
        return float(self.coefficient * x**self.exponent.value)


def fit(summaries: Sequence[CaseSummary]) -> tuple[ScalingFit, ...]:
    """Fit every group of cases along every numeric axis it takes three values of.

    Returns:
        One record per axis and group, with a reason where too few of its cases were measured.
        A HANG is not used: no progress is not slow progress.
    """
    axes = dict.fromkeys(name for s in summaries for name in s.case.swept)
    return tuple(
        fit_group(axis, members)
        for axis in axes
        for members in _groups(summaries, axis).values()
        if len({s.case.axes[axis] for s in members}) >= MIN_POINTS
    )


def fit_group(axis: str, members: Sequence[CaseSummary]) -> ScalingFit:
    """Fit cases that are equal in every axis but one."""
    points = tuple(sorted((_point(axis, s) for s in members), key=lambda p: p.x))
    case = members[0].case
    group = group_of(case, axis)
    timed = [(p.x, p.step_s.value) for p in points if p.step_s is not None]
    bounds = [
        (p.x, p.lower_bound_s) for p in points if p.step_s is None and p.lower_bound_s is not None
    ]
    distinct = len({x for x, _ in timed})
    if distinct < MIN_POINTS:
        return ScalingFit(
            axis=axis,
            group=group,
            workload=case.workload,
            points=points,
            reason=f"{distinct} measured values of {axis}; a fit needs {MIN_POINTS}",
        )
    x, y = (np.log(np.array(column)) for column in zip(*timed, strict=True))
    if bounds:
        x_c, y_c = (np.log(np.array(column)) for column in zip(*bounds, strict=True))
        slope, low, high, intercept = _tobit(x, y, x_c, y_c)
    else:
        slope, low, high, intercept = _least_squares(x, y)
    exponent = Estimate(
        value=slope,
        low=low,
        high=high,
        processes=min(p.step_s.processes for p in points if p.step_s is not None),
        samples=len(timed),
    )
    return ScalingFit(
        axis=axis,
        group=group,
        workload=case.workload,
        points=points,
        exponent=exponent,
        coefficient=math.exp(intercept),
        note=_note(axis, members, exponent, timed),
    )


def _note(
    axis: str,
    members: Sequence[CaseSummary],
    exponent: Estimate,
    timed: Sequence[tuple[float, float]],
) -> str:
    """What is suspicious about a fitted curve; empty where nothing is."""
    if abs(exponent.value) < FLAT:
        ok = [s for s in members if s.outcome is Outcome.OK]
        if all(s.effective.get(axis) == s.case.axes[axis] for s in ok):
            return (
                f"time hardly changes with {axis}, which did reach the workload: "
                "a fixed cost decides here"
            )
        return f"time does not depend on {axis}: did the axis reach the workload?"
    (x1, y1), (x2, y2) = timed[-2:]
    last = math.log(y2 / y1) / math.log(x2 / x1) if x2 > x1 else exponent.value
    if exponent.high is not None and last > max(exponent.high, exponent.value + FLAT):
        return (
            f"no power law: the curve steepens, with exponent {last:.2f} from "
            f"{axis} {x1:g} to {x2:g}"
        )
    return ""


def group_of(case: Case, axis: str) -> str:
    """Name of the group a case belongs to when cases along `axis` are taken together."""
    others = [f"{name}={_plain(case.axes[name])}" for name in case.swept if name != axis]
    return "/".join([case.workload, case.provider, *others])


def _plain(value: Scalar) -> str:
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else str(value)


def _number(value: Scalar | None) -> float | None:
    """The value as a positive number that has a logarithm, else None."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        return None
    return float(value)


def _groups(summaries: Sequence[CaseSummary], axis: str) -> dict[object, list[CaseSummary]]:
    groups: dict[object, list[CaseSummary]] = {}
    for s in summaries:
        if _number(s.case.axes.get(axis)) is not None:
            others = frozenset((k, v) for k, v in s.case.axes.items() if k != axis)
            groups.setdefault((s.case.workload, s.case.provider, others), []).append(s)
    return groups


def _point(axis: str, summary: CaseSummary) -> Point:
    x = _number(summary.case.axes[axis])
    if x is None:
        raise ValueError(f"{summary.case.case_id}: {axis} has no logarithm")
    ok = summary.outcome is Outcome.OK
    timeout = summary.outcome is Outcome.TIMEOUT
    return Point(
        case_id=summary.case.case_id,
        x=x,
        step_s=summary.metrics.get("step_s") if ok else None,
        lower_bound_s=summary.lower_bound_s if timeout else None,
    )


def _least_squares(x: Array, y: Array) -> tuple[float, float, float, float]:
    """Slope, its 95 % t-interval, and intercept of y on x; at least three points."""
    dx = x - x.mean()
    slope = float(dx @ y / (dx @ dx))
    intercept = float(y.mean() - slope * x.mean())
    residual = y - intercept - slope * x
    variance = float(residual @ residual) / (len(x) - 2)
    half = t_factor(len(x) - 2) * math.sqrt(variance / float(dx @ dx))
    return slope, slope - half, slope + half, intercept


def _tobit(x: Array, y: Array, x_c: Array, y_c: Array) -> tuple[float, float, float, float]:
    """Slope, its 95 % interval, and intercept where y_c are lower bounds at x_c.

    Maximum likelihood with a profile-likelihood interval. The cut of the profile is the one
    that makes it the t-interval where no point is censored, n * log(1 + t^2 / (n - 2)), which
    is wider than the asymptotic chi-square for the few points that a sweep has.
    """
    ones, ones_c = np.ones_like(x), np.ones_like(x_c)
    full = _maximise(np.column_stack([ones, x]), y, np.column_stack([ones_c, x_c]), y_c)
    slope, intercept = float(full.beta[1]), float(full.beta[0])

    def profile(b: float) -> float:
        return _maximise(ones[:, None], y - b * x, ones_c[:, None], y_c - b * x_c).log_likelihood

    n = len(x)
    cut = full.log_likelihood - 0.5 * n * math.log1p(t_factor(n - 2) ** 2 / (n - 2))

    def excess(b: float) -> float:
        return profile(b) - cut

    return slope, _crossing(excess, slope, -1.0), _crossing(excess, slope, 1.0), intercept


@dataclass(frozen=True, slots=True)
class _Maximum:
    beta: Array
    log_likelihood: float


def _maximise(X: Array, y: Array, X_c: Array, y_c: Array) -> _Maximum:
    """Maximum-likelihood regression with right-censored points (X_c, y_c).

    In Olsen's parameters theta = 1 / sigma and gamma = beta / sigma the log-likelihood is
    concave: sum(log theta - r^2 / 2) + sum(log Phi(-r_c)), with r = theta * y - X @ gamma.
    """
    from scipy.optimize import minimize  # slow to import, and only censored points want it

    start, *_ = np.linalg.lstsq(X, y, rcond=None)
    sigma = max(float(np.sqrt(np.mean((y - X @ start) ** 2))), 10 * MIN_SCATTER)

    def negative(parameters: Array) -> tuple[float, Array]:
        theta, gamma = parameters[0], parameters[1:]
        r, r_c = theta * y - X @ gamma, theta * y_c - X_c @ gamma
        log_survival = log_ndtr(-r_c)
        value = len(y) * math.log(theta) - 0.5 * float(r @ r) + float(log_survival.sum())
        # Hazard of the normal, phi(r) / Phi(-r), from logarithms: neither underflows.
        hazard = np.exp(-0.5 * r_c**2 - 0.5 * math.log(2 * math.pi) - log_survival)
        d_theta = len(y) / theta - float(r @ y) - float(hazard @ y_c)
        d_gamma = r @ X + hazard @ X_c
        return -value, -np.concatenate([[d_theta], d_gamma])

    result = minimize(
        negative,
        np.concatenate([[1 / sigma], start / sigma]),
        jac=True,
        method="L-BFGS-B",
        bounds=[(1e-6, 1 / MIN_SCATTER), *[(None, None)] * X.shape[1]],
        options={"maxiter": 2000, "ftol": 1e-13, "gtol": 1e-7},
    )
    theta, gamma = result.x[0], result.x[1:]
    return _Maximum(beta=gamma / theta, log_likelihood=-float(result.fun))


def _crossing(excess: Callable[[float], float], start: float, direction: float) -> float:
    """Where `excess`, positive at `start`, falls to zero in a direction."""
    from scipy.optimize import brentq

    step = 0.01
    while excess(start + direction * step) > 0:
        step *= 2
    return float(brentq(excess, start, start + direction * step, xtol=1e-4))
