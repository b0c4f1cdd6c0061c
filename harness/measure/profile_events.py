"""What ran and where the time went, from the events of a profile. Does not import torch.

Events are operators, named ranges and memory requests of the host's threads, calls of the CUDA
runtime, and work of the device. A kernel belongs to the innermost range, in the thread of its
operator, in which it was launched: a fused operator opens ranges of its own. A kernel of the
backward pass belongs to the range of the forward operator with the same number of autograd.

Each step is a range STEP, followed by a range DRAIN in which the host waits for the device.
"""

import re
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from itertools import chain
from operator import attrgetter
from typing import NamedTuple

from harness.records import Counters, Use

STEP = "harness.step"
DRAIN = "harness.drain"
MAX_NAME = 160
"""Characters kept of a kernel's name; names of templates can have a thousand."""

_LAUNCH = re.compile(r"cu(da)?(Launch(Cooperative)?Kernel|GraphLaunch)")
_GRAPH = re.compile(r"cu(da)?GraphLaunch")
_WAIT = re.compile(r"cu(da)?(Stream|Device|Event|Ctx)Synchronize|cu(da)?Memcpy(?!.*Async)")
_NCCL = re.compile(r"nccl(Dev)?Kernel")
_BACKWARD = "autograd::engine::evaluate_function: "
_COMPILED = ("Torch-Compiled Region", "## Call CompiledFxGraph", "CompiledFunction")


class EventKind(Enum):
    OPERATOR = auto()
    RANGE = auto()
    MEMORY = auto()  # one request to the CPU's allocator
    RUNTIME = auto()  # a call of CUDA's runtime or driver
    KERNEL = auto()
    COPY = auto()  # on the device: Memcpy and Memset


class Event(NamedTuple):
    """One event; a tuple, because a profile has a hundred thousand."""

    kind: EventKind
    name: str
    start_ns: int
    end_ns: int
    thread: int = 0
    id: int = 0
    """Of an operator or range; equal for a runtime call and the kernel it launched."""
    link: int = 0
    """Of a kernel, copy or runtime call: id of the operator or range that issued it, or 0."""
    sequence: int = -1
    """Autograd's number of an operator, equal in forward and backward; -1 without one."""


@dataclass(frozen=True, slots=True)
class Window:
    """A step: the host's part ends at `returned_ns`, the device's at `end_ns`."""

    start_ns: int
    returned_ns: int
    end_ns: int

    def contains(self, event: Event) -> bool:
        return self.start_ns <= event.start_ns <= self.end_ns

    def calls(self, event: Event) -> bool:
        """Whether the event began in the host's part."""
        return self.start_ns <= event.start_ns <= self.returned_ns


class Trace:
    """The events of a profile in order."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._by_kind: dict[EventKind, list[Event]] = defaultdict(list)
        for event in events:
            self._by_kind[event.kind].append(event)
        for some in self._by_kind.values():
            # If two begin together the outer one comes first: sorting is stable.
            some.sort(key=attrgetter("end_ns"), reverse=True)
            some.sort(key=attrgetter("start_ns"))
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

    def counts(self) -> tuple[Counters, ...]:
        """Counts of every step."""
        found = []
        for w in self.windows:
            calls = {(e.name, e.id) for e in self._by_kind[EventKind.RUNTIME] if w.calls(e)}
            names = [name for name, _ in calls]
            copies = [e.name for e in self._by_kind[EventKind.COPY] if w.contains(e)]
            found.append(
                Counters(
                    allocations=sum(map(w.calls, self._by_kind[EventKind.MEMORY])),
                    kernel_launches=sum(bool(_LAUNCH.match(n)) for n in names),
                    device_waits=sum(bool(_WAIT.match(n)) for n in names),
                    host_device_copies=sum("HtoD" in n or "DtoH" in n for n in copies),
                )
            )
        return tuple(found)

    def kernels(self) -> tuple[Use, ...]:
        """Kernels by name and range, most time first, per step."""
        return self._uses((e, e.end_ns - e.start_ns) for e in self._inside(EventKind.KERNEL))

    def operators(self) -> tuple[Use, ...]:
        """Operators by name and range, most time of their own first, per step."""
        timed = _own_times(self._inside(EventKind.OPERATOR))
        return self._uses((e, own) for e, own in timed if not e.name.startswith(_BACKWARD))

    def hidden(self) -> tuple[str, ...]:
        """What ran operators without the dispatcher."""
        found = []
        kinds = (EventKind.OPERATOR, EventKind.RANGE)
        if any(e.name.startswith(_COMPILED) for kind in kinds for e in self._inside(kind)):
            found.append("torch.compile")
        if any(_GRAPH.match(e.name) for e in self._inside(EventKind.RUNTIME)):
            found.append("CUDA graph")
        return tuple(found)

    @property
    def step_s(self) -> float:
        """Mean length of a step, including the device's part."""
        return sum(w.end_ns - w.start_ns for w in self.windows) / len(self.windows) / 1e9

    def busy_s(self) -> float:
        """Mean time of a step in which the device is busy."""
        busy_ns = sum(_length(_merged(self._on_device(w))) for w in self.windows)
        return busy_ns / (len(self.windows) * 1e9)

    def communication(self) -> tuple[float, float]:
        """Mean time of a step in which kernels of NCCL run, which includes their wait for other
        ranks; and that of it in which nothing else runs on the device."""
        sent_ns = exposed_ns = 0
        for w in self.windows:
            work = self._on_device(w)
            sent_ns += _length(_merged([e for e in work if _NCCL.match(e.name)]))
            others = _merged([e for e in work if not _NCCL.match(e.name)])
            exposed_ns += _length(_merged(work)) - _length(others)
        steps_ns = len(self.windows) * 1e9
        return sent_ns / steps_ns, exposed_ns / steps_ns

    def gap_by_range(self) -> Mapping[str, float]:
        """Share of the device's idle time by the range of the next kernel; that after the last
        kernel counts as ""."""
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
        """Share of the host's part of the steps by range, without the ranges inside it."""
        own: defaultdict[str, int] = defaultdict(int)
        for w in self.windows:
            covered = 0
            for span, own_ns in _own_times(filter(w.calls, self._ranges.events())):
                own[span.name] += own_ns
                covered += own_ns
            own[""] += max(0, w.returned_ns - w.start_ns - covered)
        return _shares(own)

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
            if i >= 0 and self.windows[i].contains(event):
                yield event

    def _on_device(self, window: Window) -> list[Event]:
        work = self._by_kind[EventKind.KERNEL] + self._by_kind[EventKind.COPY]
        return sorted(filter(window.contains, work), key=attrgetter("start_ns"))

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
            name = event.name
            cut = name if len(name) <= MAX_NAME else name[: MAX_NAME - 1] + "…"
            key = cut, self._range_of(event)
            calls[key] += 1
            time_ns[key] += own_ns
        steps = len(self.windows)
        uses = [
            Use(name=n, where=r, calls=calls[n, r] / steps, time_s=time_ns[n, r] / steps / 1e9)
            for n, r in calls
        ]
        return tuple(sorted(uses, key=lambda u: (-u.time_s, u.name, u.where)))


class _Ranges:
    """Ranges by thread, including those of the backward pass."""

    def __init__(self, ranges: Sequence[Event], operators: Sequence[Event]) -> None:
        self._spans: dict[int, list[Event]] = defaultdict(list)
        for e in ranges:
            if e.name not in (STEP, DRAIN):
                self._spans[e.thread].append(e)
        self._index()
        forward: dict[int, str] = {}
        backward = []
        for e in operators:
            if e.name.startswith(_BACKWARD):
                backward.append(e)
            elif e.sequence >= 0 and (name := self.around(e)):
                forward[e.sequence] = name  # the last one; autograd reuses unused numbers
        for e in backward:
            if e.sequence in forward:
                self._spans[e.thread].append(e._replace(name=forward[e.sequence]))
        self._index()

    def around(self, event: Event) -> str:
        """The innermost range of the event's thread in which it began; empty if none."""
        at, names = self._turns.get(event.thread, ((), ()))
        i = bisect_right(at, event.start_ns) - 1
        return names[i] if i >= 0 else ""

    def events(self) -> Iterator[Event]:
        """All of them, in order by thread."""
        return chain.from_iterable(self._spans.values())

    def _index(self) -> None:
        """By thread: the times at which the innermost range changes, and its name from then on."""
        self._turns: dict[int, tuple[Sequence[int], Sequence[str]]] = {}
        for thread, spans in self._spans.items():
            spans.sort(key=lambda s: (s.start_ns, -s.end_ns))
            at: list[int] = []
            names: list[str] = []
            open_: list[Event] = []
            for span in [*spans, Event(EventKind.RANGE, "", 2**63, 2**63)]:
                while open_ and open_[-1].end_ns <= span.start_ns:
                    ended = open_.pop()
                    at.append(ended.end_ns)
                    names.append(open_[-1].name if open_ else "")
                at.append(span.start_ns)
                names.append(span.name)
                open_.append(span)
            self._turns[thread] = at, names


def _merged(events: Iterable[Event]) -> list[tuple[int, int]]:
    """When any of these events runs, of events in order, as disjoint intervals."""
    merged: list[tuple[int, int]] = []
    for event in events:
        if merged and event.start_ns <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], event.end_ns))
        else:
            merged.append((event.start_ns, event.end_ns))
    return merged


def _length(intervals: Iterable[tuple[int, int]]) -> int:
    return sum(end - start for start, end in intervals)


def _own_times(events: Iterable[Event]) -> Iterator[tuple[Event, int]]:
    """Each operator with its time without that of the operators it called; ranges likewise."""
    open_: dict[int, list[tuple[Event, int]]] = defaultdict(list)
    for event in events:
        stack = open_[event.thread]
        while stack and stack[-1][0].end_ns <= event.start_ns:
            yield _closed(stack)
        stack.append((event, event.end_ns - event.start_ns))
    for stack in open_.values():
        while stack:
            yield _closed(stack)


def _closed(stack: list[tuple[Event, int]]) -> tuple[Event, int]:
    """Pop the innermost operator and subtract its time from the one around it."""
    event, own_ns = stack.pop()
    if stack:
        outer, outer_ns = stack[-1]
        stack[-1] = outer, outer_ns - (event.end_ns - event.start_ns)
    return event, max(0, own_ns)


def _shares(amounts: Mapping[str, int]) -> Mapping[str, float]:
    total = sum(amounts.values())
    found = {name: amount / total for name, amount in amounts.items() if amount and total}
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))
