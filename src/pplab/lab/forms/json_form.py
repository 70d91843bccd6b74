"""Write timelines and runs as plain JSON values, and read timelines back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from typing import TYPE_CHECKING

from ...errors import expect, number
from ...schedule import Schedule
from ...text import parse
from ...timeline import Span, Timeline
from .explorer import record
from .safe_text import printable, printable_in

if TYPE_CHECKING:
    from ...runtime import Run

_OF_SCHEDULE = ("num_ranks", "num_stages", "num_microbatches")
_OF_RUN = ("notes", "losses", "first_loss", "step_times_ms", "step_time_ms", "recompute_ms")
_OF_GRADIENTS = (
    "equal",
    "relative",
    "tolerance",
    "worst",
    "loss_difference",
    "noticed",
    "noise",
    "causes",
)


def timeline_to_dict(timeline: Timeline) -> dict:
    """Everything that is needed to redraw a timeline, as plain JSON values."""
    return {**record(timeline), "placement": timeline.schedule.placement}


def timeline_from_dict(data: dict) -> Timeline:
    """The timeline that `timeline_to_dict` wrote. Raises ValueError for anything else."""
    with reading("this timeline", "what lab.timeline_to_dict has written"):
        data = printable_in(data)
        schedule = Schedule(data["rows"], data["schedule"])
        spans, ranks = data["spans"], range(schedule.num_ranks)
        if [(*span[:2],) for span in spans] != [
            (rank, str(x)) for rank, row in enumerate(schedule.rows) for x in row
        ]:
            raise ValueError("spans of other actions than those of the rows")
        starts, ends = ([number("a time", span[at]) for span in spans] for at in (2, 3))
        if not any(end > start for start, end in zip(starts, ends, strict=True)):
            raise ValueError("spans that take no time")
        others = (
            Span(
                ranks.index(rank),
                text if text[:1].isalpha() else parse(text),
                *(number("a time", x) for x in at),
            )
            for rank, text, *at in data.get("others", ())
        )
        expect(str, unit=data["unit"], how=data["how"])
        return Timeline(schedule, starts, ends, data["unit"], data["how"], tuple(others))


def run_to_dict(run: Run) -> dict:
    """Everything that is needed to redraw a run, and what its extras found, as plain JSON
    values.
    """
    extras = {
        name: found.to_dict() if hasattr(found, "to_dict") else found
        for name, found in run.extras.items()
    }
    if held := extras.pop("held", {}):
        held["predicted_peak_bytes"] = run.predicted_peak_bytes
    return {
        "schedule": run.schedule.name,
        **{name: getattr(run.schedule, name) for name in _OF_SCHEDULE},
        "workload": run.job.workload.name,
        **asdict(run.machine),
        "engine": run.job.engine_name,
        "first_step": run.job.first_step,
        "how": run.job.how,
        "precision": str(run.job.options.autocast or "float32").removeprefix("torch."),
        **{name: getattr(run, name) for name in _OF_RUN},
        **held,
        "gradients": run.gradients
        and {name: getattr(run.gradients, name) for name in _OF_GRADIENTS},
        **extras,
        "timelines": [timeline_to_dict(timeline) for timeline in run.timelines],
    }


@contextmanager
def reading(what: str, expected: str) -> Iterator[None]:
    """Turn whatever damaged data raises into a ValueError."""
    try:
        yield
    except Exception as error:
        # no damage: there is no such file, or it can't be opened
        if isinstance(error, OSError) and error.errno:
            raise
        found = f"{type(error).__name__}: {str(error)[:200]}"
        said = f"{what} is damaged, or something else: expected {expected}; found {found}"
        raise ValueError(printable(said)) from None
