"""From the events of a profile to what ran and where the time went. No torch in here.

A profile holds operators, named ranges and memory requests of the host's threads, calls of the
CUDA runtime, and what the device did. A kernel belongs to the innermost range in which it was
launched, by the thread of the operator that launched it: a fused operator opens ranges within
itself. Where that lies in the backward pass it belongs to the range of the forward operator whose
gradient it computes, which autograd numbers alike.

Steps are windows: a range STEP around each run, and a range DRAIN around the wait for the device
that follows it, so that what a step launched is done before the next begins.
"""

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from operator import attrgetter
from typing import NamedTuple

from harness.records import Use

STEP = "harness.step"
DRAIN = "harness.drain"
MAX_NAME = 160
"""Letters of a kernel's name that are kept; templates write on for a thousand."""

_LAUNCH = re.compile(r"cu(da)?(Launch(Cooperative)?Kernel|GraphLaunch)")
_GRAPH = re.compile(r"cu(da)?GraphLaunch")
_WAIT = re.compile(r"cu(da)?(Stream|Device|Event|Ctx)Synchronize|cu(da)?Memcpy(?!.*Async)")
_BACKWARD = "autograd::engine::evaluate_function: "
_COMPILED = ("Torch-Compiled Region", "## Call CompiledFxGraph", "CompiledFunction")


class EventKind(Enum):
    """What an event tells of."""

    OPERATOR = auto()
    RANGE = auto()
    MEMORY = auto()  # one request to the CPU's allocator
    RUNTIME = auto()  # a call of CUDA's runtime or driver
    KERNEL = auto()
    COPY = auto()  # on the device: Memcpy and Memset


class Event(NamedTuple):
    """One event, whatever wrote it. A tuple, for there are a hundred thousand."""

    kind: EventKind
    name: str
    start_ns: int
    end_ns: int
    thread: int = 0
    id: int = 0
    """Of an operator or range; of a runtime call and the kernel it launched what they share."""
    link: int = 0
    """Of a kernel, copy or runtime call: the id of the operator or range that made it; or 0."""
    sequence: int = -1
    """Autograd's number of an operator, forward and backward alike; -1 for none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCounts:
    """Exact counts of one window."""

    allocations: int
    kernel_launches: int
    device_waits: int
    host_device_copies: int


@dataclass(frozen=True, slots=True)
class _Span:
    start_ns: int
    end_ns: int
    name: str


@dataclass(frozen=True, slots=True)
class Window:
    """A step: the host's part up to `returned_ns`, the device's up to `end_ns`."""

    start_ns: int
    returned_ns: int
    end_ns: int

    def holds(self, at_ns: int) -> bool:
        return self.start_ns <= at_ns <= self.end_ns


class Trace:
    """Events, put in order once and asked many things."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._by_kind: dict[EventKind, list[Event]] = defaultdict(list)
        for event in events:
            self._by_kind[event.kind].append(event)
        for some in self._by_kind.values():
            some.sort(key=attrgetter("end_ns"), reverse=True)  # of two that begin as one, the
            some.sort(key=attrgetter("start_ns"))  # outer one first: sorting is stable
        self.windows = self._windows()
        self._ranges = _Ranges(self._by_kind[EventKind.RANGE], self._by_kind[EventKind.OPERATOR])
        self._owners = {
            e.id: e for e in [*self._by_kind[EventKind.OPERATOR], *self._by_kind[EventKind.RANGE]]
        }
        self._launches = {
            e.id: e for e in self._by_kind[EventKind.RUNTIME] if _LAUNCH.match(e.name)
        }

    def has(self, kind: EventKind) -> bool:
        return bool(self._by_kind[kind])

    def counts(self) -> tuple[StepCounts, ...]:
        """Of every step by itself."""
        found = []
        for w in self.windows:
            calls = {
                (e.name, e.id): e
                for e in self._by_kind[EventKind.RUNTIME]
                if w.start_ns <= e.start_ns <= w.returned_ns
            }
            names = [name for name, _ in calls]
            copies = [e.name for e in self._by_kind[EventKind.COPY] if w.holds(e.start_ns)]
            found.append(
                StepCounts(
                    allocations=sum(
                        w.start_ns <= e.start_ns <= w.returned_ns
                        for e in self._by_kind[EventKind.MEMORY]
                    ),
                    kernel_launches=sum(bool(_LAUNCH.match(n)) for n in names),
                    device_waits=sum(bool(_WAIT.match(n)) for n in names),
                    host_device_copies=sum("HtoD" in n or "DtoH" in n for n in copies),
                )
            )
        return tuple(found)

    def kernels(self) -> tuple[Use, ...]:
        """Kernels by name and range, the longest first, per step."""
        return self._uses((e, e.end_ns - e.start_ns) for e in self._inside(EventKind.KERNEL))

    def operators(self) -> tuple[Use, ...]:
        """Operators by name and range, the one with most time of its own first, per step."""
        timed = _own_times(self._inside(EventKind.OPERATOR))
        return self._uses((e, own) for e, own in timed if not e.name.startswith(_BACKWARD))

    def runtime(self) -> Mapping[str, float]:
        """Calls of CUDA's interface, and copies by kind, per step."""
        counted = Counter(
            e.name
            for w in self.windows
            for e in self._by_kind[EventKind.RUNTIME]
            if w.start_ns <= e.start_ns <= w.returned_ns
        )
        counted.update(e.name for e in self._inside(EventKind.COPY))
        return {name: n / len(self.windows) for name, n in counted.most_common()}

    def hidden(self) -> tuple[str, ...]:
        """What kept operators from the dispatcher."""
        found = []
        kinds = (EventKind.OPERATOR, EventKind.RANGE)
        if any(e.name.startswith(_COMPILED) for kind in kinds for e in self._inside(kind)):
            found.append("torch.compile")
        if any(_GRAPH.match(e.name) for e in self._inside(EventKind.RUNTIME)):
            found.append("CUDA graph")
        return tuple(found)

    @property
    def step_s(self) -> float:
        """Mean length of a step, the device's part included."""
        return sum(w.end_ns - w.start_ns for w in self.windows) / len(self.windows) / 1e9

    def busy_s(self) -> float:
        """Time of a step in which the device does anything, on average."""
        return sum(end - start for w in self.windows for start, end in self.busy(w)) / (
            len(self.windows) * 1e9
        )

    def busy(self, window: Window) -> list[tuple[int, int]]:
        """When the device works, as intervals apart from each other, in order."""
        merged: list[tuple[int, int]] = []
        for event in self._on_device(window):
            if merged and event.start_ns <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(merged[-1][1], event.end_ns))
            else:
                merged.append((event.start_ns, event.end_ns))
        return merged

    def gap_by_range(self) -> Mapping[str, float]:
        """Share of the device's idle time by the range whose kernel it waited for; "" holds what
        came after the last kernel too."""
        idle: defaultdict[str, int] = defaultdict(int)
        for w in self.windows:
            reached = w.start_ns
            for event in self._on_device(w):
                if event.start_ns > reached:
                    idle[self._range_of(event)] += event.start_ns - reached
                reached = max(reached, event.end_ns)
            idle[""] += max(0, w.end_ns - reached)
        return _shares(idle)

    def host_by_range(self) -> Mapping[str, float]:
        """Share of the host's part of the steps by range, ranges inside a range apart."""
        own: defaultdict[str, int] = defaultdict(int)
        for w in self.windows:
            covered = 0
            for span, own_ns in self._ranges.own_times(w.start_ns, w.returned_ns):
                own[span.name] += own_ns
                covered += own_ns
            own[""] += max(0, w.returned_ns - w.start_ns - covered)
        return _shares(own)

    def range_at(self, at_ns: int) -> str:
        """The innermost range that any thread of the host was in at that time."""
        return self._ranges.at(at_ns)

    def _windows(self) -> tuple[Window, ...]:
        steps = [e for e in self._by_kind[EventKind.RANGE] if e.name == STEP]
        drains = [e for e in self._by_kind[EventKind.RANGE] if e.name == DRAIN]
        ends = [d.end_ns for d in drains]
        return tuple(
            Window(s.start_ns, s.end_ns, ends[i] if i < len(ends) else s.end_ns)
            for i, s in enumerate(steps)
        )

    def _inside(self, kind: EventKind) -> Iterator[Event]:
        """Events of a kind that began within a step, each once, in order."""
        starts = [w.start_ns for w in self.windows]
        for event in self._by_kind[kind]:
            i = bisect_right(starts, event.start_ns) - 1
            if i >= 0 and self.windows[i].holds(event.start_ns):
                yield event

    def _on_device(self, window: Window) -> list[Event]:
        found = [
            e
            for kind in (EventKind.KERNEL, EventKind.COPY)
            for e in self._by_kind[kind]
            if window.holds(e.start_ns)
        ]
        return sorted(found, key=lambda e: e.start_ns)

    def _range_of(self, event: Event) -> str:
        if event.kind not in (EventKind.KERNEL, EventKind.COPY):
            return self._ranges.around(event)
        if event.link not in self._owners:
            return ""
        owner = self._owners[event.link]
        if owner.kind is EventKind.RANGE and owner.name not in (STEP, DRAIN):
            return owner.name
        launch = self._launches.get(event.id)
        if launch is None or not owner.start_ns <= launch.start_ns <= owner.end_ns:
            return self._ranges.around(owner)
        return self._ranges.around(owner._replace(start_ns=launch.start_ns))

    def _uses(self, timed: Iterable[tuple[Event, int]]) -> tuple[Use, ...]:
        calls: Counter[tuple[str, str]] = Counter()
        time_ns: Counter[tuple[str, str]] = Counter()
        for event, own_ns in timed:
            key = short(event.name), self._range_of(event)
            calls[key] += 1
            time_ns[key] += own_ns
        steps = len(self.windows)
        uses = [
            Use(name=n, where=r, calls=calls[n, r] / steps, time_s=time_ns[n, r] / steps / 1e9)
            for n, r in calls
        ]
        return tuple(sorted(uses, key=lambda u: (-u.time_s, u.name, u.where)))


class _Ranges:
    """Ranges by thread, those of the backward pass included."""

    def __init__(self, ranges: Sequence[Event], operators: Sequence[Event]) -> None:
        self._spans: dict[int, list[_Span]] = defaultdict(list)
        for e in ranges:
            if e.name not in (STEP, DRAIN):
                self._spans[e.thread].append(_Span(e.start_ns, e.end_ns, e.name))
        self._index()
        forward: dict[int, str] = {}
        backward = []
        for e in operators:
            if e.name.startswith(_BACKWARD):
                backward.append(e)
            elif e.sequence >= 0 and (name := self.around(e)):
                forward[e.sequence] = name  # the last: numbers are handed on until one is used
        for e in backward:
            if e.sequence in forward:
                name = forward[e.sequence]
                self._spans[e.thread].append(_Span(e.start_ns, e.end_ns, name))
        self._index()

    def around(self, event: Event) -> str:
        """The innermost range on the event's thread that it began in."""
        return self._innermost(event.thread, event.start_ns)

    def at(self, at_ns: int) -> str:
        for thread in self._spans:
            if name := self._innermost(thread, at_ns):
                return name
        return ""

    def own_times(self, start_ns: int, end_ns: int) -> Iterator[tuple[_Span, int]]:
        """Every range that began in between, with its time less that of ranges inside it."""
        for spans in self._spans.values():
            inside = [s for s in spans if start_ns <= s.start_ns <= end_ns]
            for i, span in enumerate(inside):
                nested, reached = 0, span.start_ns
                for other in inside[i + 1 :]:
                    if other.start_ns >= span.end_ns:
                        break
                    if other.end_ns > reached:
                        nested += other.end_ns - max(other.start_ns, reached)
                        reached = other.end_ns
                yield span, max(0, span.end_ns - span.start_ns - nested)

    def _index(self) -> None:
        """Which range is innermost from when on, by thread."""
        self._turns: dict[int, tuple[list[int], list[str]]] = {}
        for thread, spans in self._spans.items():
            spans.sort(key=lambda s: (s.start_ns, -s.end_ns))
            at: list[int] = []
            names: list[str] = []
            open_: list[_Span] = []
            for span in [*spans, _Span(2**63, 2**63, "")]:
                while open_ and open_[-1].end_ns <= span.start_ns:
                    ended = open_.pop()
                    at.append(ended.end_ns)
                    names.append(open_[-1].name if open_ else "")
                at.append(span.start_ns)
                names.append(span.name)
                open_.append(span)
            self._turns[thread] = at, names

    def _innermost(self, thread: int, at_ns: int) -> str:
        if thread not in self._turns:
            return ""
        at, names = self._turns[thread]
        i = bisect_right(at, at_ns) - 1
        return names[i] if i >= 0 else ""


def short(name: str) -> str:
    """A kernel's name without what no reader wants."""
    return name if len(name) <= MAX_NAME else name[: MAX_NAME - 1] + "…"


def _own_times(operators: Iterable[Event]) -> Iterator[tuple[Event, int]]:
    """Each operator with its time less that of the operators it called."""
    open_: dict[int, list[tuple[Event, int]]] = defaultdict(list)
    for event in operators:
        stack = open_[event.thread]
        while stack and stack[-1][0].end_ns <= event.start_ns:
            yield _closed(stack)
        stack.append((event, event.end_ns - event.start_ns))
    for stack in open_.values():
        while stack:
            yield _closed(stack)


def _closed(stack: list[tuple[Event, int]]) -> tuple[Event, int]:
    """Take the innermost operator off, and its time off that of the one around it."""
    event, own_ns = stack.pop()
    if stack:
        outer, outer_ns = stack[-1]
        stack[-1] = outer, outer_ns - (event.end_ns - event.start_ns)
    return event, max(0, own_ns)


def _shares(amounts: Mapping[str, int]) -> Mapping[str, float]:
    total = sum(amounts.values())
    found = {name: amount / total for name, amount in amounts.items() if amount and total}
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))
