"""Tables of what `make gpu` and `make bench` measure of single stages, and of runs beside what that predicts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from operator import itemgetter
from pathlib import Path

from .json_form import reading
from .results import Results, load

Lines = Callable[[list[Mapping]], Iterable[Mapping]]


def _shows(part: str, says: str, columns: str, lines: Lines = iter) -> Callable[..., Results]:
    """The function that makes a table of what was measured in one part: a heading and a format for each column, of the
    values of a row, or of what `lines` makes of the rows."""
    cut = [column.index("{") for column in columns.split(" | ")]
    pairs = [(column[:at].strip(), column[at:]) for column, at in zip(columns.split(" | "), cut, strict=True)]

    def table(folder: Path | str | None = None) -> Results:
        rows: list[tuple[str, ...]] = []
        for recording in load(folder):
            with reading(str(recording.path), f"what `make gpu` or `make bench` records in its part {part}"):
                for row in lines(recording.rows(part)):
                    rows.append((recording.title(part), *(form.format_map(row) for _, form in pairs)))
        return Results(("device, date", *(heading for heading, _ in pairs)), rows, says)

    table.__doc__ = says
    return table


def _by_width(rows: list[Mapping]) -> Iterator[Mapping]:
    """A line for each width and dtype: between what its ratios are where launches don't set the pace, and how far they
    do."""
    rows = sorted(rows, key=itemgetter("dtype", "width", "tokens"))
    for (width, dtype), group in groupby(rows, key=itemgetter("width", "dtype")):
        each = list(group)
        own = [row["ratios"] for row in each if row["pace"] != "launches"]
        launched = [f"{row['tokens']:,} tokens" for row in each if row["pace"] == "launches"]
        found = {name: [ratios[name][1] for ratios in own] for name in each[0]["ratios"]}
        said = {name: f"{min(some):.2f} to {max(some):.2f}" if some else "-" for name, some in found.items()}
        yield {**said, "width": width, "dtype": dtype, "launched": (launched or ["-"])[-1]}


durations = _shows(
    "stages",
    "What is assumed of durations, after the colon, and between what the measured medians are, for all numbers of "
    "tokens at which launches don't set the pace.",
    "width {width} | dtype {dtype} | B / F: 2 {B/F} | (I + W) / B: 1 {(I+W)/B} | I / F: 1 {I/F} | W / F: 1 {W/F} | "
    "launches set the pace up to {launched}",
    _by_width,
)
stages = _shows(
    "stages",
    "How long F, B, I and W of two layers of a GPT take in one process: medians, and medians of the ratios of "
    "neighbouring times. Floating-point operations are counted from the shapes.",
    "width {width} | tokens {tokens:,} | dtype {dtype} | F ms {ms[F]:.2f} | B ms {ms[B]:.2f} | I ms {ms[I]:.2f} | "
    "W ms {ms[W]:.2f} | F TFLOP/s {tflops[F]:.3g} | B TFLOP/s {tflops[B]:.3g} | B/F {ratios[B/F][1]:.2f} | "
    "(I+W)/B {ratios[(I+W)/B][1]:.2f} | W/F {ratios[W/F][1]:.2f} | the pace is set by {pace}",
)
copies = _shows(
    "copies",
    "Copies to the host (out) and back beside forwards and backwards: how far they slow each other down. lab.Offload "
    "assumes that they don't.",
    "the host's memory {memory} | copies {ways} | alone, GB/s {alone_gb_per_s:.1f} | "
    "beside compute, GB/s {beside_gb_per_s:.1f} | compute takes {slower:.2f} times as long",
)
offload = _shows(
    "offload",
    "A step on one rank whose activations wait on the host: measured, and as lab.Offload predicts it from a step "
    "without copies.",
    "workload {workload} | schedule {schedule} | without copies, ms {plain_ms:.1f} | with, ms {measured_ms:.1f} | "
    "predicted, ms {predicted_ms:.1f} | error {error:+.1%}",
)
predicted = _shows(
    "predicted",
    "Steps predicted from the durations of runs of one schedule, and measured: the fastest of each.",
    "ranks {num_ranks} | sharing {sharing} | workload {workload} | durations of {measured} | schedule {schedule} | "
    "predicted, ms {predicted_ms:.1f} | measured, ms {measured_ms:.1f} | error {error:+.1%}",
    lambda rows: ({**row, **each} for row in rows for each in row["schedules"]),
)
cores = _shows(
    "cores",
    "Runs without pace on a processor that has a core for every rank: their bubbles, beside those of simulations with "
    "the runs' own durations. Then the same at a pace, and the schedule's bubble at these durations.",
    "ranks {num_ranks} | schedule {schedule} | without pace, ms {free[makespan_ms]:.1f} | "
    "bubble {free[bubble_fraction]:.3f} | simulated {free[predicted_bubble_fraction]:.3f} | "
    "paced, ms {makespan_ms:.1f} | paced to simulated {ratio:.3f} | paced, bubble {bubble_fraction:.3f} | "
    "the schedule's {predicted_bubble_fraction:.3f}",
    lambda rows: ({**row, "ratio": row["makespan_ms"] / row["predicted_makespan_ms"]} for row in rows),
)
TABLES = (durations, stages, copies, offload, predicted, cores)
