"""The tables of what `make gpu` and `make bench` record. All have the same form: a heading and a format for each
column.

python benchmarks/gpu_tables.py [FOLDER]      prints them, by default those of the repository's results
"""

from __future__ import annotations

import html
import re
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

from records import failed, not_run

from pplab.lab.forms import Recording, Table, load, reading

LONG = 11  # rows: a longer table is folded on the page
NONE = "No run on GPUs has been recorded yet: `make gpu`, on a machine with GPUs, records one."

Lines = Callable[[Recording], Iterable[Mapping]]


class Results(Table):
    """A table of measurements, or a sentence that there are none."""

    def __init__(self, columns: Iterable[str], rows: Iterable[Iterable[str]], caption: str = ""):
        super().__init__(tuple(row) for row in rows)
        self.columns, self.caption = tuple(columns), caption

    def __str__(self) -> str:
        return f"{self.caption}\n{super().__str__()}".strip() if self else NONE

    __repr__ = __str__

    def _repr_html_(self) -> str:
        if not self:
            return f"<p>{NONE.replace('`', '<code>', 1).replace('`', '</code>', 1)}</p>"
        said = html.escape(self.caption)
        if len(self) <= LONG:
            return f"<p>{said}</p>{super()._repr_html_()}"
        return f"<details><summary>{said} ({len(self)} rows)</summary>{super()._repr_html_()}</details>"


class Tables(dict):
    """Tables by name, one below the other, or a sentence that there are none."""

    def __str__(self) -> str:
        return "\n\n".join(map(str, self._shown()))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return "".join(table._repr_html_() for table in self._shown())

    def _shown(self) -> Iterable[Results]:
        return self.values() or (Results((), ()),)


class Shape(NamedTuple):
    """A table of what was measured in one part. `columns` has heading and format of each. The values are those of a
    row, or those that `lines` makes from a recording. A line may have a title of its own."""

    name: str
    part: str
    says: str
    columns: str
    lines: Lines | None = None
    of_gpus: bool = False  # of what other commands record, parts may have the same names

    def table(self, recordings: Iterable[Recording]) -> Results:
        """The recordings' rows, one after the other."""
        cut = [(column[: (at := column.index("{"))].strip(), column[at:]) for column in self.columns.split(" | ")]
        rows: list[tuple[str, ...]] = []
        for recording in recordings:
            if self.of_gpus and recording.data["kind"] != "cuda":
                continue
            with reading(str(recording.path), f"what `make gpu` or `make bench` records in its part {self.part}"):
                for line in (self.lines or of(self.part))(recording):
                    title = line.get("title") or recording.title(self.part)
                    rows.append((title, *(form.format_map(line) for _, form in cut)))
        return Results(("device, date", *(heading for heading, _ in cut)), rows, self.says)


def of(part: str, more: Callable[[Mapping], Mapping] = lambda row: {}) -> Lines:
    """The rows of a part, each with more values derived from it."""
    return lambda recording: ({**row, **more(row)} for row in recording.rows(part))


def _machine(recording: Recording) -> Iterator[Mapping]:
    """GPUs, driver, versions, and what a reader of their results should know."""
    box, versions = recording.data["box"], recording.data["versions"]
    device, *_ = box["devices"]
    yield {
        **device,
        "gb": device["memory_bytes"] / 1e9,
        "driver": box["driver"] or "-",
        "versions": ", ".join(f"{name} {versions[name] or '-'}" for name in ("torch", "cuda", "nccl")),
        "notes": "; ".join(each for part in recording.data["parts"] for each in part.get("problems", ())) or "-",
    }


def _gradients(recording: Recording) -> Iterator[Mapping]:
    """Whether every schedule computes what one process does, and holds the bytes that it should, for a tiny model."""
    found: dict[tuple, dict[str, Mapping]] = defaultdict(dict)
    for part in ("smoke", "gradients", "nccl"):
        for row in recording.rows(part):
            if "transport" in row:
                found[recording.title(part), row["num_ranks"], row["dtype"], row["transport"]][row["schedule"]] = row
    for (title, *_), schedules in found.items():
        wrong = [name for name, row in schedules.items() if row["wrong"]]
        yield {
            **next(iter(schedules.values())),
            "title": title,
            "right": f"{len(schedules) - len(wrong)} of {len(schedules)}",
            "largest": _largest(schedules.values()),
            "wrong": ", ".join(wrong) or "-",
        }


def _largest(rows: Iterable[Mapping]) -> str:
    """The largest difference from one process, as a share of a gradient's norm, or in older recordings of one
    element."""
    shares = [row["relative"] for row in rows if "relative" in row]
    return f"{max(shares):.1e} of its norm" if shares else f"{max(row['difference'] for row in rows):.1e}"


def _assumption(row: Mapping) -> Mapping:
    """Whether an assumption holds. Of several figures of a name, it shows the median."""
    figures = {name: [x] if isinstance(x, (int, float)) else x for name, x in row["measured"].items()}
    said = ", ".join(f"{name} {statistics.median(found):.3g}" for name, found in figures.items())
    return {name: _yes(row[name]) for name in ("expected", "found", "agrees")} | {"figures": said}


def _link(row: Mapping) -> Mapping:
    each = ", ".join(f"{_bytes(int(n))} {ms:.3g} ms" for n, ms in row["ms_of_bytes"].items())
    ranks = " and ".join(map(str, row["pair"]))
    whole = "-" if "wrong" not in row else "; ".join(row["wrong"]) or "whole"  # older recordings only have times
    speed = {"us": row["latency_ms"] * 1e3, "gb_per_s": row["bytes_per_ms"] / 1e6}
    return {"ranks": ranks, **speed, "each": each, "whole": whole}


def _nccl(recording: Recording) -> Iterator[Mapping]:
    """Runs that ended or didn't, and memory that was asked for meanwhile."""
    for row in recording.rows("nccl"):
        if "ended" in row:
            yield {**row, "what": row["schedule"], "how": "ends" if row["ended"] else row["said"].splitlines()[0]}
        elif "waited" in row:
            waits = "waits" if row["waited"] else "doesn't wait"
            how = f"takes {row['host_ms']:.2f} ms, and {waits} for the receive"
            yield {**row, "what": "cudaMalloc during a receive", "how": how}


def _by_width(recording: Recording) -> Iterator[Mapping]:
    """A line for each width and dtype: the range of its ratios where launches don't set the pace, and up to where they
    do."""
    rows = sorted(recording.rows("stages"), key=itemgetter("dtype", "width", "tokens"))
    for (width, dtype), group in groupby(rows, key=itemgetter("width", "dtype")):
        each = list(group)
        own = [row["ratios"] for row in each if row["pace"] != "launches"]
        launched = [f"{row['tokens']:,} tokens" for row in each if row["pace"] == "launches"]
        found = {name: [ratios[name][1] for ratios in own] for name in each[0]["ratios"]}
        said = {name: f"{min(some):.2f} to {max(some):.2f}" if some else "-" for name, some in found.items()}
        said |= {"width": width, "dtype": dtype, "launched": (launched or ["-"])[-1]}
        yield defaultdict(lambda: "-", said)  # what older recordings lack


def _run(row: Mapping) -> Mapping:
    """What was measured, with what was simulated in brackets."""
    share = {cause: time / sum(row["where"].values()) for cause, time in row["where"].items() if time}
    return {
        "makespan": "{measured[makespan_ms]:.1f} ({predicted[makespan_ms]:.1f})".format_map(row),
        "bubble": "{measured[bubble_fraction]:.3f} ({predicted[bubble_fraction]:.3f})".format_map(row),
        "held": f"{_mega(row['peak_bytes'])} ({_mega(row['predicted_peak_bytes'])})",
        "allocator": _allocator(row),
        "settled": _yes(row["settled"]),
        "mhz": _span(row.get("clocks", ()), "sm"),
        "shares": ", ".join(f"{cause} {part:.1%}" for cause, part in share.items()),
    }


def _allocator(row: Mapping) -> str:
    """The allocator's peak of the fullest rank, and what that rank is expected to need."""
    if not row.get("allocated_bytes"):
        return "-"
    expected = [4 * w + held for w, held in zip(row["resident_bytes"], row["predicted_peak_bytes"], strict=True)]
    fullest = max(range(len(expected)), key=row["allocated_bytes"].__getitem__)
    return f"{row['allocated_bytes'][fullest] / 1e6:.1f} ({expected[fullest] / 1e6:.1f})"


def _clocks(recording: Recording) -> Iterator[Mapping]:
    """The GPUs' clock, power and temperature after the rows of each part, from the least to the most."""
    for part in recording.data["parts"]:
        if found := [gpu for row in part["rows"] for gpu in row.get("clocks", ())]:
            spans = {name: _span(found, name) for name in ("sm", "power", "celsius")}
            yield {"title": recording.title(part["name"]), "part": part["name"], "rows": len(part["rows"]), **spans}


def _tests(recording: Recording) -> Iterator[Mapping]:
    """The results in pytest's words. In older recordings each test has a row of its own."""
    if found := Counter(row["outcome"] for row in recording.rows("tests") if "outcome" in row):
        yield {"what": "all", "closing_line": ", ".join(f"{count} {outcome}" for outcome, count in found.items())}
    yield from (row for part in ("tests", "chapters") for row in recording.rows(part) if "closing_line" in row)


def _not_run(recording: Recording) -> Iterator[Mapping]:
    for what, why in (*failed(recording), *not_run(recording)):
        yield {"what": what, "why": why}


def _yes(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "NO"


def _mega(counts: Iterable[float] | None) -> str:
    """The largest of some byte counts in MB."""
    return f"{max(counts) / 1e6:.1f}" if counts else "-"


def _bytes(size: int) -> str:
    """A number of bytes, a power of two, in words."""
    return f"{size} B" if size < 2**10 else f"{size / 2**10:g} KiB" if size < 2**20 else f"{size / 2**20:g} MiB"


def _span(found: Sequence[Mapping[str, str]], name: str) -> str:
    """The range of what nvidia-smi tells about the GPUs, without its unit, or - where it doesn't know."""
    figures = [float(match[0]) for each in found if (match := re.match(r"[\d.]+", each.get(name, "")))]
    low, high = (f"{pick(figures, default=0):.0f}" for pick in (min, max))
    return "-" if not figures else low if low == high else f"{low} to {high}"


SHAPES = (
    Shape(
        "machines",
        "check",
        "The machines, and what their runs noted.",
        "memory, capability {gb:.0f} GB, {compute_capability} | driver {driver} | versions {versions} | notes {notes}",
        _machine,
        of_gpus=True,
    ),
    Shape(
        "gradients",
        "gradients",
        "A tiny GPT under every schedule: its gradients against one process's, and its bytes against the schedule's.",
        "ranks {num_ranks} | dtype {dtype} | messages {transport} | schedules right {right} | "
        "largest difference {largest} | wrong {wrong}",
        _gradients,
        of_gpus=True,
    ),
    Shape(
        "assumptions",
        "assumptions",
        "Assumptions from NVIDIA's documents, tested.",
        "assumption {assumption} | expected {expected} | found {found} | agrees {agrees} | measured {figures} | "
        "expected by {documents}",
        of("assumptions", _assumption),
        of_gpus=True,
    ),
    Shape(
        "nccl",
        "nccl",
        "Ranks on one GPU that send by NCCL. Do receives that wait there at the same time end, and does memory wait?",
        "ranks {num_ranks} | sharing {sharing} | what {what} | it {how}",
        _nccl,
        of_gpus=True,
    ),
    Shape(
        "links",
        "links",
        "Messages from rank to rank. gloo sends them through the host's memory.",
        "ranks {ranks} | messages {transport} | latency, us {us:.1f} | GB/s {gb_per_s:.2f} | one way {each} | "
        "bytes arrive {whole}",
        of("links", _link),
        of_gpus=True,
    ),
    Shape(
        "batch",
        "batch",
        "Batches of the measured GPT, doubled while memory lasts until every stage's forward takes 5 ms.",
        "sequences {batch_size} | shortest forward, ms {forward_ms:.1f}",
        of_gpus=True,
    ),
    Shape(
        "sharing",
        "slow_down",
        "How much the ranks of a shared GPU slow each other down: the time of one matrix product of a rank, alone and "
        "while all ranks compute theirs.",
        "ranks {num_ranks} | sharing {sharing} | one alone, ms {alone_ms:.2f} | "
        "all at once take {ratio:.2f} times that | notes {said}",
        of("slow_down", lambda row: {"said": "; ".join(row["notes"])}),
    ),
    Shape(
        "durations",
        "stages",
        "Durations: the assumed ratio (after the colon in a heading) and the range of the measured medians, over all "
        "numbers of tokens at which the GPU and not its host sets the pace. A dash stands for what wasn't measured.",
        "width {width} | dtype {dtype} | B / F: 2 {B/F} | (I + W) / B: 1 {(I+W)/B} | I / F: 1 {I/F} | W / F: 1 {W/F} | "
        "B / autograd's B {B/autograd's B} | torch's (I + W) / autograd's B {torch's (I+W)/autograd's B} | "
        "launches set the pace up to {launched}",
        _by_width,
    ),
    Shape(
        "stages",
        "stages",
        "How long F, B, I and W of two layers of a GPT take in one process: medians, and medians of the ratios of "
        "times that were measured next to each other. Floating-point operations are counted from the shapes.",
        "width {width} | tokens {tokens:,} | dtype {dtype} | F ms {ms[F]:.2f} | B ms {ms[B]:.2f} | I ms {ms[I]:.2f} | "
        "W ms {ms[W]:.2f} | F TFLOP/s {tflops[F]:.3g} | B TFLOP/s {tflops[B]:.3g} | B/F {ratios[B/F][1]:.2f} | "
        "(I+W)/B {ratios[(I+W)/B][1]:.2f} | W/F {ratios[W/F][1]:.2f} | the pace is set by {pace}",
    ),
    Shape(
        "copies",
        "copies",
        "Copies to the host (out) and back while the GPU runs forwards and backwards. lab.Offload assumes that neither "
        "slows the other down.",
        "the host's memory {memory} | copies {ways} | alone, GB/s {alone_gb_per_s:.1f} | "
        "beside compute, GB/s {beside_gb_per_s:.1f} | compute takes {slower:.2f} times as long",
    ),
    Shape(
        "predicted",
        "predicted",
        "Steps predicted from the durations of one schedule, and the fastest step that was measured.",
        "ranks {num_ranks} | sharing {sharing} | workload {workload} | durations of {measured} | schedule {schedule} | "
        "predicted, ms {predicted_ms:.1f} | measured, ms {measured_ms:.1f} | error {error:+.1%}",
        lambda recording: ({**row, **each} for row in recording.rows("predicted") for each in row["schedules"]),
    ),
    Shape(
        "runs",
        "runs",
        "Training runs and their simulation with their own durations, which differ in order and waiting alone. Memory "
        "is the fullest rank's, in MB. The allocator's peak includes weights, gradients and optimizer, so four times "
        "the weights (AdamW) are expected in addition to what forwards hold. Times are the schedule's only if every "
        "rank has a GPU or a core. A run has settled if its last two steps agree within a twentieth. Where the time "
        "went is a mean over the ranks.",
        "ranks {num_ranks} | sharing {sharing} | workload {workload} | dtype {dtype} | schedule {schedule} | "
        "step ms {step_time_ms:.1f} | makespan, ms (simulated) {makespan} | bubble (simulated) {bubble} | "
        "held (predicted) {held} | allocator (expected) {allocator} | settled {settled} | MHz {mhz} | "
        "where the time went {shares}",
        of("runs", _run),
    ),
    Shape(
        "versus",
        "versus",
        "pplab's runtime against PyTorch's on the same stages. Below 1, pplab is faster.",
        "ranks {num_ranks} | workload {workload} | schedule {schedule} | pplab ms {pplab_ms:.1f} | "
        "torch ms {torch_ms:.1f} | ratio {ratio:.2f} | of rounds {least:.2f} to {most:.2f}",
        of("versus", lambda row: {"least": min(row["ratios"]), "most": max(row["ratios"])}),
    ),
    Shape(
        "clocks",
        "clocks",
        "Clock of the multiprocessors, power and temperature after each row. Don't compare figures whose clocks "
        "differ.",
        "part {part} | rows {rows} | MHz {sm} | W {power} | Celsius {celsius}",
        _clocks,
        of_gpus=True,
    ),
    Shape(
        "tests",
        "tests",
        "The runtime's tests, and chapters that were executed on the GPUs.",
        "what {what} | outcome {closing_line}",
        _tests,
        of_gpus=True,
    ),
    Shape(
        "not run",
        "of what wasn't run",
        "What failed or was left out. A stage was left out if it might need more than 0.8 of the memory.",
        "not run {what} | because {why}",
        _not_run,
    ),
)


def tables(folder: Path | str | None = None) -> Tables:
    """All tables of the recordings in a folder that aren't empty, by name."""
    recordings = load(folder)
    found = {shape.name: shape.table(recordings) for shape in SHAPES}
    return Tables({name: table for name, table in found.items() if table})


if __name__ == "__main__":
    print(tables(*sys.argv[1:2]))
