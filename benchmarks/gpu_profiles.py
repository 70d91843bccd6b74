"""What a trace of `lab.Profile` says about a rank's step.

On a GPU, compute is the time of kernels, and communication that of NCCL's kernels and of copies to and from the host;
the first of several steps is left out, because the recording of kernels starts in it. On a CPU, compute is the time of
the spans of actions and of the optimizer, and communication that of gloo's works, from when they are posted until they
are done.

So communication contains waiting for a peer that isn't ready, as it does in every profiler's table. `lab.where` tells
the two apart.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pplab.timeline import total

Interval = tuple[float, float]


@dataclass(frozen=True)
class RankProfile:
    """A rank's mean step in its trace. Times in ms."""

    rank: int
    step_ms: float
    compute_ms: float
    communication_ms: float  # transfers under way or waited for
    overlap_ms: float  # of that, while the rank computed

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


def summarise(trace: Path, rank: int) -> RankProfile:
    """A rank's mean step in a trace that `lab.Profile` has recorded."""
    named: dict[str, list[Interval]] = {}
    device: dict[str, list[Interval]] = {"compute": [], "communication": []}
    for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]:
        if event.get("ph") != "X" or "dur" not in event:
            continue
        span, name, category = (event["ts"], event["ts"] + event["dur"]), event["name"], event.get("cat")
        if category == "user_annotation":
            named.setdefault(name.partition(":" if name.startswith("pplab:") else "#")[0], []).append(span)
        elif category in ("kernel", "gpu_memcpy"):
            transfers = (category == "gpu_memcpy" and "DtoD" not in name) or "nccl" in name.lower()
            device["communication" if transfers else "compute"].append(span)
    steps = sorted(named["ProfilerStep"])
    if device["compute"]:
        steps = steps[1:] or steps
        compute, transfers = device["compute"], device["communication"]
    else:
        compute = [*named["pplab"], *named.get("Optimizer.step", ())]
        transfers = [span for name, spans in named.items() if name.startswith("gloo:") for span in spans]
    compute, transfers = (_within(_union(spans), steps) for spans in (compute, transfers))
    each = 1e-3 / len(steps)
    return RankProfile(
        rank,
        _length(steps) * each,
        _length(compute) * each,
        _length(transfers) * each,
        _length(_within(transfers, compute)) * each,
    )


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
