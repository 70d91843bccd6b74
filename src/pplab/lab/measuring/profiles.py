"""What a `torch.profiler` trace says about a step: one summary per rank, read from the trace's JSON.

The trace of a rank holds the spans pp.step, pp.forward, pp.backward (pp.backward_input, pp.backward_weight,
pp.overlap), pp.send, pp.receive and pp.optimizer_step, the forwards and backwards inside pp.warmup, pp.steady and
pp.drain. On a GPU, compute is the time of kernels, and communication that of NCCL's kernels and of copies to and from
the host; phases last as long as their kernels do, and the first of several steps is left out, because the recording of
kernels starts in it. On a CPU, compute is the time of the spans of actions and of the optimizer, and communication that
of gloo's works, from when they are posted until they are done, or of pp.send and pp.receive where ranks share memory.

So communication contains waiting for a peer that isn't ready, as it does in every profiler's table. `lab.where` tells
the two apart.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ...timeline import total
from ..forms import reading

PHASES = ("warmup", "steady", "drain")
_COMPUTE = ("forward", "backward", "backward_input", "backward_weight", "overlap", "optimizer_step")
_TRANSFERS = ("gloo:", "pp.send", "pp.receive")

Interval = tuple[float, float]


@dataclass(frozen=True)
class RankProfile:
    """A rank's mean step in its trace. Times in ms."""

    rank: int
    step_ms: float
    compute_ms: float
    communication_ms: float  # transfers under way or waited for
    overlap_ms: float  # of that, while the rank computed
    phases_ms: dict[str, float]
    peak_bytes: int | None  # allocated at once: weights and all; None when the trace has no record of memory
    path: str = ""  # of the trace, which the Perfetto viewer opens

    @property
    def utilisation(self) -> float:
        """The share of the step in which the rank computed."""
        return self.compute_ms / self.step_ms

    @property
    def communication_share(self) -> float:
        """Communication over the sum of communication and compute."""
        return self.communication_ms / ((self.communication_ms + self.compute_ms) or 1)

    @property
    def overlap_share(self) -> float:
        """The share of communication that compute hides."""
        return self.overlap_ms / (self.communication_ms or 1)

    def to_dict(self) -> dict:
        """The figures as plain JSON values."""
        shares = ("utilisation", "communication_share", "overlap_share")
        return {**asdict(self), **{name: getattr(self, name) for name in shares}}


@dataclass(frozen=True, repr=False)
class ProfileReport:
    """The traces of a run's ranks, summarised."""

    name: str  # of the schedule, and the engine if it isn't pplab's
    ranks: tuple[RankProfile, ...]

    @property
    def step_ms(self) -> float:
        """The slowest rank's step."""
        return max(rank.step_ms for rank in self.ranks)

    def mean(self, figure: str) -> float:
        """The ranks' mean of a figure: "utilisation", "communication_share", "overlap_share", "peak_bytes"."""
        return total(getattr(rank, figure) or 0 for rank in self.ranks) / len(self.ranks)

    def to_dict(self) -> dict:
        """The figures as plain JSON values."""
        return {"name": self.name, "step_ms": self.step_ms, "ranks": [rank.to_dict() for rank in self.ranks]}

    def __str__(self) -> str:
        return profile_table([self])

    __repr__ = __str__


def profile_table(profiles: Sequence[ProfileReport]) -> str:
    """One line per profile, means over its ranks: the table by which profiles of schedules are usually compared."""
    head = f"{'profile':30}{'step ms':>9}{'compute':>9}{'communic.':>11}{'overlapped':>12}{'peak memory':>13}"
    rows = [
        f"{p.name:30}{p.step_ms:9.1f}{p.mean('utilisation'):9.1%}{p.mean('communication_share'):11.1%}"
        f"{p.mean('overlap_share'):12.1%}{p.mean('peak_bytes') / 1e6:10.1f} MB"
        for p in profiles
    ]
    return "\n".join([head, *rows])


def summarise(trace: str | Path | dict, rank: int = 0, *, resident_bytes: int = 0) -> RankProfile:
    """A rank's mean step in a trace that `lab.Profile` recorded: the file, or its JSON.

    `resident_bytes` is what was held when the recording started (weights and buffers): a trace has only changes.
    Raises ValueError when the trace has no pp.step span.
    """
    what = "this trace" if isinstance(trace, dict) else str(trace)
    with reading(what, "a trace that lab.Profile has recorded, with a pp.step span"):
        return _summarise(trace, rank, resident_bytes)


def _summarise(trace: str | Path | dict, rank: int, resident_bytes: int) -> RankProfile:
    events = (trace if isinstance(trace, dict) else _read(Path(trace)))["traceEvents"]
    named: dict[str, list[Interval]] = {}
    launched: dict[str, list[Interval]] = {}  # the same spans in the device's time, by stream
    device: dict[str, list[Interval]] = {"compute": [], "communication": []}
    for event in events:
        if event.get("ph") != "X" or "dur" not in event:
            continue
        span, name, category = (event["ts"], event["ts"] + event["dur"]), event["name"], event.get("cat")
        if category == "user_annotation":
            named.setdefault(name, []).append(span)
        elif category == "gpu_user_annotation":
            launched.setdefault(name, []).append(span)
        elif category in ("kernel", "gpu_memcpy"):
            transfers = (category == "gpu_memcpy" and "DtoD" not in name) or "nccl" in name.lower()
            device["communication" if transfers else "compute"].append(span)
    recorded = steps = sorted(named.get("pp.step", []))
    if not _length(steps) > 0:
        raise ValueError(f"no pp.step span among the trace's {len(events)} events: record it with lab.Profile")
    if device["compute"]:
        steps = recorded[1:] or recorded
        compute, transfers = device["compute"], device["communication"]
    else:
        compute = [span for name in _COMPUTE for span in named.get(f"pp.{name}", ())]
        transfers = [span for name, spans in named.items() if name.startswith(_TRANSFERS) for span in spans]
    compute, transfers = (_within(_union(spans), steps) for spans in (compute, transfers))
    each, phases = 1e-3 / len(steps), launched or named
    return RankProfile(
        rank,
        _length(steps) * each,
        _length(compute) * each,
        _length(transfers) * each,
        _length(_within(transfers, compute)) * each,
        {phase: _length(_within(_union(phases.get(f"pp.{phase}", ())), steps)) * each for phase in PHASES},
        _peak(events, recorded, resident_bytes),
        "" if isinstance(trace, dict) else str(trace),
    )


def _read(path: Path) -> dict:
    return json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())


def _peak(events: Iterable[dict], steps: Sequence[Interval], resident_bytes: int) -> int | None:
    """The most that was allocated on the rank's device in a step."""
    changes = [(e["ts"], e["args"]) for e in events if e.get("name") == "[memory]"]
    if not changes:
        return None
    kind = max(args["Device Type"] for _, args in changes)  # 0 is the CPU, 1 a GPU
    held, peak, first = resident_bytes, resident_bytes, min(start for start, _ in steps)
    for at, args in sorted(changes, key=lambda change: change[0]):
        if args["Device Type"] == kind and at >= first:
            held += args["Bytes"]
            peak = max(peak, held)
    return peak


def _union(spans: Iterable[Interval]) -> list[Interval]:
    """Spans that don't overlap and cover the same time."""
    merged: list[Interval] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _within(spans: Iterable[Interval], others: Sequence[Interval]) -> list[Interval]:
    """What is in both; within each list nothing overlaps."""
    found, others, k = [], sorted(others), 0
    for start, end in sorted(spans):
        while k < len(others) and others[k][1] <= start:
            k += 1
        for low, high in others[k:]:
            if low >= end:
                break
            found.append((max(start, low), min(end, high)))
    return found


def _length(spans: Iterable[Interval]) -> float:
    return total(end - start for start, end in spans)
