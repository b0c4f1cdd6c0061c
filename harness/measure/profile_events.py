"""What ran and where the time went, from the events of a profile. Does not import torch.

A kernel belongs to the innermost range, in the thread of its operator, in which it was launched: a
fused operator opens ranges of its own. A kernel of the backward pass belongs to the range of the
forward operator with the same number of autograd. Each step is a range STEP, followed by a range
DRAIN in which the host waits for the device.
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

from harness.records import Use

STEP = "harness.step"
DRAIN = "harness.drain"
MAX_NAME = 160
"""Characters kept of a kernel's name; names of templates can have a thousand."""

_LAUNCH = re.compile(r"cu(da)?(Launch(Cooperative)?Kernel|GraphLaunch)")
_GRAPH = re.compile(r"cu(da)?GraphLaunch")
_WAIT = re.compile(r"cu(da)?(Stream|Device|Event|Ctx)Synchronize|cu(da)?Memcpy(?!.*Async)")
_OFF_DEVICE = re.compile(r"HtoD|DtoH")
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
    forward: int = 0
    """Of a backward operator: the thread of its forward one, which alone makes numbers unique."""


@dataclass(frozen=True, slots=True)
class Window:
    """A step: the host's part ends at `returned_ns`, the device's at `end_ns`."""

    start_ns: int
    returned_ns: int
    end_ns: int

    def begun(self, events: Iterable[Event], *, by_host: bool = False) -> list[Event]:
        """The events that began in the step, or in the host's part of it."""
        end_ns = self.returned_ns if by_host else self.end_ns
        return [e for e in events if self.start_ns <= e.start_ns <= end_ns]


class Trace:
    """The events of a profile in order."""

    def __init__(self, events: Iterable[Event]) -> None:
        self._by_kind: dict[EventKind, list[Event]] = defaultdict(list)
        # If two begin together the outer one comes first.
        for event in sorted(events, key=lambda e: (e.start_ns, -e.end_ns)):
            self._by_kind[event.kind].append(event)
        operators, ranges = self._by_kind[EventKind.OPERATOR], self._by_kind[EventKind.RANGE]
        steps = [e for e in ranges if e.name == STEP]
        drains = [e for e in ranges if e.name == DRAIN]
        self.windows = tuple(
            Window(step.start_ns, step.end_ns, drain.end_ns)
            for step, drain in zip(steps, drains, strict=True)
        )
        self._ranges = _Ranges(ranges, operators)
        self._owners = {e.id: e for e in [*operators, *ranges]}
        called = self._by_kind[EventKind.RUNTIME]
        self.sees_the_gpu = bool(called)  # the wait after each step is a call
        self._launches = {e.id: e for e in called if _LAUNCH.match(e.name)}
        work = self._by_kind[EventKind.KERNEL] + self._by_kind[EventKind.COPY]
        work.sort(key=attrgetter("start_ns"))
        self._on_device = [w.begun(work) for w in self.windows]
        """What the device does in each step, in order."""

    def counts(self) -> Mapping[str, list[int]]:
        """Counter -> its value in every step."""
        found: dict[str, list[int]] = defaultdict(list)
        for w in self.windows:
            called = w.begun(self._by_kind[EventKind.RUNTIME], by_host=True)
            names = [name for name, _ in {(e.name, e.id) for e in called}]
            copies = [e.name for e in w.begun(self._by_kind[EventKind.COPY])]
            requests = w.begun(self._by_kind[EventKind.MEMORY], by_host=True)
            found["allocations"].append(len(requests))
            found["kernel_launches"].append(len([n for n in names if _LAUNCH.match(n)]))
            found["device_waits"].append(len([n for n in names if _WAIT.match(n)]))
            found["host_device_copies"].append(len([n for n in copies if _OFF_DEVICE.search(n)]))
        return found

    def kernels(self) -> tuple[Use, ...]:
        """Kernels by name and range, most time first, per step."""
        return self._uses((e, e.end_ns - e.start_ns) for e in self._inside(EventKind.KERNEL))

    def operators(self) -> tuple[Use, ...]:
        """Operators by name and range, most time of their own first, per step."""
        timed = _own_times([*self._inside(EventKind.OPERATOR)])
        return self._uses((e, own) for e, own in timed if not e.name.startswith(_BACKWARD))

    def hidden(self) -> tuple[str, ...]:
        """What ran operators without the dispatcher."""
        named = [*self._inside(EventKind.OPERATOR), *self._inside(EventKind.RANGE)]
        ran = {
            "torch.compile": any(e.name.startswith(_COMPILED) for e in named),
            "CUDA graph": any(_GRAPH.match(e.name) for e in self._inside(EventKind.RUNTIME)),
        }
        return tuple(name for name, found in ran.items() if found)

    def busy_s(self) -> float:
        """Mean time of a step in which the device is busy."""
        return sum(map(_covered_ns, self._on_device)) / (len(self.windows) * 1e9)

    def communication(self) -> tuple[float, float]:
        """Mean time of a step in which kernels of NCCL run, which includes their wait for other
        ranks; and that of it in which nothing else runs on the device."""
        sent_ns = exposed_ns = 0
        for work in self._on_device:
            sent_ns += _covered_ns(e for e in work if _NCCL.match(e.name))
            others_ns = _covered_ns(e for e in work if not _NCCL.match(e.name))
            exposed_ns += _covered_ns(work) - others_ns
        steps_ns = len(self.windows) * 1e9
        return sent_ns / steps_ns, exposed_ns / steps_ns

    def gap_by_range(self) -> Mapping[str, float]:
        """Share of the device's idle time by the range of the next kernel; that after the last
        kernel counts as ""."""
        idle: defaultdict[str, int] = defaultdict(int)
        for w, work in zip(self.windows, self._on_device, strict=True):
            reached = w.start_ns
            for event in work:
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
            for span, own_ns in _own_times(w.begun(self._ranges.events(), by_host=True)):
                own[span.name] += own_ns
                covered += own_ns
            own[""] += max(0, w.returned_ns - w.start_ns - covered)
        return _shares(own)

    def _inside(self, kind: EventKind) -> Iterator[Event]:
        """Events of a kind that began within a step, in order."""
        return chain.from_iterable(w.begun(self._by_kind[kind]) for w in self.windows)

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
            if len(name) > MAX_NAME:
                name = name[: MAX_NAME - 1] + "…"
            key = name, self._range_of(event)
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
        for e in [e for e in ranges if e.name not in (STEP, DRAIN)]:
            self._spans[e.thread].append(e)
        self._index()
        forward: dict[tuple[int, int], str] = {}
        backward = []
        for e in operators:
            if e.name.startswith(_BACKWARD):
                backward.append(e)
            elif e.sequence >= 0 and not e.forward and (name := self.around(e)):
                forward[e.thread, e.sequence] = name  # the last one; unused numbers are reused
        for e in backward:
            if name := forward.get((e.forward, e.sequence), ""):
                self._spans[e.thread].append(e._replace(name=name))
        self._index()

    def around(self, event: Event) -> str:
        """The innermost range of the event's thread in which it began; empty if none."""
        spans, outer = self._spans.get(event.thread, []), self._outer.get(event.thread, [])
        i = bisect_right(spans, event.start_ns, key=attrgetter("start_ns")) - 1
        while i >= 0 and spans[i].end_ns <= event.start_ns:
            i = outer[i]
        return spans[i].name if i >= 0 else ""

    def events(self) -> Iterator[Event]:
        """All of them, in order by thread."""
        return chain.from_iterable(self._spans.values())

    def _index(self) -> None:
        """By thread: for each range, the index of the one around it; -1 if none is."""
        self._outer: dict[int, list[int]] = {}
        for thread, spans in self._spans.items():
            spans.sort(key=lambda s: (s.start_ns, -s.end_ns))
            outer = self._outer[thread] = []
            open_ = [-1]
            for i, span in enumerate(spans):
                while open_[-1] >= 0 and spans[open_[-1]].end_ns <= span.start_ns:
                    open_.pop()
                outer.append(open_[-1])
                open_.append(i)


def _covered_ns(events: Iterable[Event]) -> int:
    """Time in which any of these events runs, of events in order."""
    covered = reached = 0
    for event in events:
        covered += max(0, event.end_ns - max(reached, event.start_ns))
        reached = max(reached, event.end_ns)
    return covered


def _own_times(events: Sequence[Event]) -> list[tuple[Event, int]]:
    """Each operator with its time without that of the operators it called; ranges likewise."""
    own_ns = [event.end_ns - event.start_ns for event in events]
    open_: dict[int, list[int]] = defaultdict(list)
    for i, event in enumerate(events):
        stack = open_[event.thread]
        while stack and events[stack[-1]].end_ns <= event.start_ns:
            stack.pop()
        if stack:
            own_ns[stack[-1]] -= event.end_ns - event.start_ns
        stack.append(i)
    return [(event, max(0, ns)) for event, ns in zip(events, own_ns, strict=True)]


def _shares(amounts: Mapping[str, int]) -> Mapping[str, float]:
    total = sum(amounts.values())
    found = {name: amount / total for name, amount in amounts.items() if amount and total}
    return dict(sorted(found.items(), key=lambda pair: -pair[1]))
