"""What is told of a timeline takes as long as it has spans: no figure reads all of it once for every rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import matplotlib.pyplot as plt
import pytest

import pplab as pp
from pplab import lab
from pplab.deps import incoming
from pplab.timeline import Span


class Read(list):
    """A list that counts how many of its values are read."""

    count = 0

    def __iter__(self) -> Iterator:
        self.count += len(self)
        return super().__iter__()

    def __getitem__(self, at: int | slice) -> object:
        found = super().__getitem__(at)
        self.count += len(found) if isinstance(at, slice) else 1
        return found


def reads_per_span(figure: object, num_ranks: int, num_microbatches: int) -> float:
    """Of the times, of what ranks did beside the schedule, and of the actions' stages."""
    s = pp.build("1F1B", num_ranks=num_ranks, num_microbatches=num_microbatches)
    columns = replace(s.columns, stages=Read(s.columns.stages))
    object.__setattr__(s, "columns", columns)
    t = pp.simulate(s, pp.Costs(latency=0.5))
    waits = [Span(*span[:2], span.start, span.start) for span in t.spans]
    others = [span._replace(action=incoming(span.action, s.num_stages)) for span in waits]
    others = Read(span for span in others if span.action)
    others += [Span(rank, "optimizer", t.makespan, t.makespan + 1) for rank in range(num_ranks)]
    t = replace(t, starts=Read(t.starts), ends=Read(t.ends), others=others)
    lists = t.starts, t.ends, t.others, columns.stages
    before = sum(each.count for each in lists)
    figure(t)
    plt.close("all")
    return (sum(each.count for each in lists) - before) / len(t.ends)


FIGURES = {
    **{
        name: lambda t, name=name: getattr(t, name)
        for name in ("idle", "bubble_fraction", "bubble_ratio", "span_bubble_fraction")
    },
    "spans_of": lambda t: list(map(t.spans_of, range(t.schedule.num_ranks))),
    "stages_of": lambda t: [t.schedule.stages_of(span.rank) for span in t.spans],
    "idle_intervals": pp.idle_intervals,
    "critical_path": pp.critical_path,
    "gantt": pp.gantt,
    "memory_chart": lab.memory_chart,
    "table": lambda t: lab.table([t])._repr_html_(),
    "where": lab.where,
    "calibrate": lab.calibrate,
    "timeline_to_dict": lab.timeline_to_dict,
}


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_reads_each_span_as_often_whatever_the_number_of_ranks(name):
    few, many = (reads_per_span(FIGURES[name], P, 4 * P) for P in (4, 16))
    assert 0 < many < 1.5 * few, (few, many)
