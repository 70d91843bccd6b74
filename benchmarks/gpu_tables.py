"""The tables of what `make gpu` and `make bench` record: all of one shape, a heading and a format for each column.

python benchmarks/gpu_tables.py [FOLDER]      prints them: of the repository's results, if no folder is named
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

from records import failed, load, not_run

from pplab.lab.forms import Recording, Table, reading

LONG = 24  # rows: a longer table is folded on the page
NONE = "No run on GPUs has been recorded yet: `make gpu`, on a machine with GPUs, records one."

Lines = Callable[[Recording], Iterable[Mapping]]


class Results(Table):
    """A table of measurements, or where there are none, a sentence that says so."""

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
    """Tables by name, which stand one below the other; a sentence where there is none."""

    def __str__(self) -> str:
        return "\n\n".join(map(str, self._shown()))

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return "".join(table._repr_html_() for table in self._shown())

    def _shown(self) -> Iterable[Results]:
        return self.values() or (Results((), ()),)


class Shape(NamedTuple):
    """A table of what was measured in one part. `columns`: heading and format of each, of the values of a row, or of
    what `lines` makes of a recording; a line may have a title of its own."""

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
    """A part's rows, each with more values that are made of it."""
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
    """Whether every schedule computes what one process does, and holds the bytes that it should: of a tiny model."""
    found: dict[tuple, dict[str, Mapping]] = defaultdict(dict)
    for part in ("smoke", "gradients"):
        for row in recording.rows(part):
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
    """The largest difference from one process: as a share of a gradient's norm, or, where older recordings have no
    other, of one element."""
    shares = [row["relative"] for row in rows if "relative" in row]
    return f"{max(shares):.1e} of its norm" if shares else f"{max(row['difference'] for row in rows):.1e}"


def _assumption(row: Mapping) -> Mapping:
    """Whether it holds; of several figures of a name, their median."""
    figures = {name: [x] if isinstance(x, (int, float)) else x for name, x in row["measured"].items()}
    said = ", ".join(f"{name} {statistics.median(found):.3g}" for name, found in figures.items())
    return {name: _yes(row[name]) for name in ("expected", "found", "agrees")} | {"figures": said}


def _link(row: Mapping) -> Mapping:
    each = ", ".join(f"{_bytes(int(n))} {ms:.3g} ms" for n, ms in row["ms_of_bytes"].items())
    ranks = " and ".join(map(str, row["pair"]))
    return {"ranks": ranks, "us": row["latency_ms"] * 1e3, "gb_per_s": row["bytes_per_ms"] / 1e6, "each": each}


def _room(row: Mapping) -> Mapping:
    needs = f"{row['needed'] / 1e9:.1f} of {row['card_bytes'] / 1e9:.1f}" if "needed" in row else "-"
    return {"most": row.get("most", "-"), "needs": needs}


def _by_width(recording: Recording) -> Iterator[Mapping]:
    """A line for each width and dtype: between what its ratios are where launches don't set the pace, and how far they
    do."""
    rows = sorted(recording.rows("stages"), key=itemgetter("dtype", "width", "tokens"))
    for (width, dtype), group in groupby(rows, key=itemgetter("width", "dtype")):
        each = list(group)
        own = [row["ratios"] for row in each if row["pace"] != "launches"]
        launched = [f"{row['tokens']:,} tokens" for row in each if row["pace"] == "launches"]
        found = {name: [ratios[name][1] for ratios in own] for name in each[0]["ratios"]}
        said = {name: f"{min(some):.2f} to {max(some):.2f}" if some else "-" for name, some in found.items()}
        yield {**said, "width": width, "dtype": dtype, "launched": (launched or ["-"])[-1]}


def _run(row: Mapping) -> Mapping:
    return {
        "equal": "equal" if row["gradients"]["equal"] else "NOT equal",
        "held": _mega(row["peak_bytes"]),
        "expected": _mega(row["predicted_peak_bytes"]),
        "allocator": _allocator(row),
    }


def _allocator(row: Mapping) -> str:
    """The allocator's peak of the fullest rank, and what that rank is expected to need."""
    if not row.get("allocated_bytes"):
        return "-"
    expected = [4 * w + held for w, held in zip(row["resident_bytes"], row["predicted_peak_bytes"], strict=True)]
    fullest = max(range(len(expected)), key=row["allocated_bytes"].__getitem__)
    return f"{row['allocated_bytes'][fullest] / 1e6:.1f} ({expected[fullest] / 1e6:.1f})"


def _simulated(row: Mapping) -> Mapping:
    """What was measured, and in brackets what was simulated where it could be."""
    forms = {"makespan_ms": ".1f", "bubble_fraction": ".3f"}
    by = [row["measured"], *([row["predicted"]] if "predicted" in row else [])]
    said = {
        name: " (".join(f"{each[name]:{form}}" for each in by) + ")" * (len(by) > 1) for name, form in forms.items()
    }
    hosts = f"{max(row['hosts_share']):.0%}" if row.get("hosts_share") else "-"
    return {**said, "hosts": hosts, "settled": _yes(row.get("settled")), "mhz": _span(row.get("clocks", ()), "sm")}


def _where(row: Mapping) -> Mapping:
    parts = row.get("where", {})
    shares = (f"{cause} {time / sum(parts.values()):.1%}" for cause, time in parts.items() if time)
    return {"shares": ", ".join(shares) or "-"}


def _profile(row: Mapping) -> Mapping:
    """Means over the ranks, and the slowest one's step."""
    names = ("utilisation", "communication_share", "overlap_share")
    shares = {name: statistics.fmean(rank[name] for rank in row["profile"]) for name in names}
    return {**shares, "slowest": max(rank["step_ms"] for rank in row["profile"])}


def _clocks(recording: Recording) -> Iterator[Mapping]:
    """The GPUs' clock, power and temperature behind the rows of each part: from the least to the most."""
    for part in recording.data["parts"]:
        if found := [gpu for row in part["rows"] for gpu in row.get("clocks", ())]:
            spans = {name: _span(found, name) for name in ("sm", "power", "celsius")}
            yield {"title": recording.title(part["name"]), "part": part["name"], "rows": len(part["rows"]), **spans}


def _tests(recording: Recording) -> Iterator[Mapping]:
    if found := Counter(row["outcome"] for row in recording.rows("tests") if "outcome" in row):
        yield dict.fromkeys(("passed", "failed", "skipped"), 0) | found


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
    """From the least to the most of what nvidia-smi says of the GPUs, without its unit; - where it doesn't know."""
    figures = [float(match[0]) for each in found if (match := re.match(r"[\d.]+", each.get(name, "")))]
    low, high = (f"{pick(figures, default=0):.0f}" for pick in (min, max))
    return "-" if not figures else low if low == high else f"{low} to {high}"


SHAPES = (
    Shape(
        "machines",
        "check",
        "The machines.",
        "memory, capability {gb:.0f} GB, {compute_capability} | driver {driver} | versions {versions} | notes {notes}",
        _machine,
        of_gpus=True,
    ),
    Shape(
        "gradients",
        "gradients",
        "A tiny GPT under every schedule: gradients beside those of one process, and bytes beside the schedule's.",
        "ranks {num_ranks} | dtype {dtype} | messages {transport} | schedules right {right} | "
        "largest difference {largest} | wrong {wrong}",
        _gradients,
        of_gpus=True,
    ),
    Shape(
        "assumptions",
        "assumptions",
        "What the runtime takes from NVIDIA's documents, tried.",
        "assumption {assumption} | expected {expected} | found {found} | agrees {agrees} | measured {figures} | "
        "expected by {documents}",
        of("assumptions", _assumption),
        of_gpus=True,
    ),
    Shape(
        "nccl",
        "nccl",
        "Ranks on one GPU that send by NCCL: do receives that wait there beside each other end?",
        "ranks {num_ranks} | sharing {sharing} | schedule {schedule} | the run {how} | s {seconds:.1f}",
        of("nccl", lambda row: {"how": "ends" if row["ended"] else row["said"].splitlines()[0]}),
        of_gpus=True,
    ),
    Shape(
        "links",
        "links",
        "Messages from rank to rank. By gloo, they go through the host's memory.",
        "ranks {ranks} | messages {transport} | latency, us {us:.1f} | GB/s {gb_per_s:.2f} | one way {each}",
        of("links", _link),
        of_gpus=True,
    ),
    Shape(
        "batch",
        "batch",
        "The measured GPT's batch: so large that every stage's forward takes its time, as far as there is room.",
        "sequences {batch_size} | room for {most} | GB at most, of {needs}",
        of("batch", _room),
        of_gpus=True,
    ),
    Shape(
        "sharing",
        "slow_down",
        "How far the ranks of a shared GPU slow each other down: the time of one matrix product of a rank, alone and "
        "while all ranks compute theirs.",
        "ranks {num_ranks} | sharing {sharing} | one alone, ms {alone_ms:.2f} | "
        "all at once take {ratio:.2f} times that | notes {said}",
        of("slow_down", lambda row: {"said": "; ".join(row["notes"])}),
    ),
    Shape(
        "durations",
        "stages",
        "What is assumed of durations, after the colon, and between what the measured medians are, for all numbers of "
        "tokens at which launches don't set the pace.",
        "width {width} | dtype {dtype} | B / F: 2 {B/F} | (I + W) / B: 1 {(I+W)/B} | I / F: 1 {I/F} | W / F: 1 {W/F} | "
        "launches set the pace up to {launched}",
        _by_width,
    ),
    Shape(
        "stages",
        "stages",
        "How long F, B, I and W of two layers of a GPT take in one process: medians, and medians of the ratios of "
        "neighbouring times. Floating-point operations are counted from the shapes.",
        "width {width} | tokens {tokens:,} | dtype {dtype} | F ms {ms[F]:.2f} | B ms {ms[B]:.2f} | I ms {ms[I]:.2f} | "
        "W ms {ms[W]:.2f} | F TFLOP/s {tflops[F]:.3g} | B TFLOP/s {tflops[B]:.3g} | B/F {ratios[B/F][1]:.2f} | "
        "(I+W)/B {ratios[(I+W)/B][1]:.2f} | W/F {ratios[W/F][1]:.2f} | the pace is set by {pace}",
    ),
    Shape(
        "copies",
        "copies",
        "Copies to the host (out) and back beside forwards and backwards: how far they slow each other down. "
        "lab.Offload assumes that they don't.",
        "the host's memory {memory} | copies {ways} | alone, GB/s {alone_gb_per_s:.1f} | "
        "beside compute, GB/s {beside_gb_per_s:.1f} | compute takes {slower:.2f} times as long",
    ),
    Shape(
        "offload",
        "offload",
        "A step on one rank whose activations wait on the host: measured, and as lab.Offload predicts it from a step "
        "without copies.",
        "workload {workload} | schedule {schedule} | without copies, ms {plain_ms:.1f} | with, ms {measured_ms:.1f} | "
        "predicted, ms {predicted_ms:.1f} | error {error:+.1%}",
    ),
    Shape(
        "predicted",
        "predicted",
        "Steps predicted from the durations of runs of one schedule, and measured: the fastest of each.",
        "ranks {num_ranks} | sharing {sharing} | workload {workload} | durations of {measured} | schedule {schedule} | "
        "predicted, ms {predicted_ms:.1f} | measured, ms {measured_ms:.1f} | error {error:+.1%}",
        lambda recording: ({**row, **each} for row in recording.rows("predicted") for each in row["schedules"]),
    ),
    Shape(
        "cores",
        "cores",
        "Runs without pace on a processor that has a core for every rank: their bubbles, beside those of simulations "
        "with the runs' own durations. Then the same at a pace, and the schedule's bubble at these durations.",
        "ranks {num_ranks} | schedule {schedule} | without pace, ms {free[makespan_ms]:.1f} | "
        "bubble {free[bubble_fraction]:.3f} | simulated {free[predicted_bubble_fraction]:.3f} | "
        "paced, ms {makespan_ms:.1f} | paced to simulated {ratio:.3f} | paced, bubble {bubble_fraction:.3f} | "
        "the schedule's {predicted_bubble_fraction:.3f}",
        of("cores", lambda row: {"ratio": row["makespan_ms"] / row["predicted_makespan_ms"]}),
    ),
    Shape(
        "runs",
        "runs",
        "Training runs. Memory is the fullest rank's, in MB. The allocator's peak has weights, gradients and the "
        "optimizer in it: expected are four times the weights (AdamW) and what is held. Step times are the schedule's "
        "only where every rank has a GPU.",
        "ranks {num_ranks} | sharing {sharing} | workload {workload} | dtype {dtype} | schedule {schedule} | "
        "step ms {step_time_ms:.1f} | gradients {equal} | held (predicted) {held} ({expected}) | "
        "allocator (expected) {allocator}",
        of("runs", _run),
    ),
    Shape(
        "simulated",
        "runs",
        "Runs beside their simulation with their own durations: what differs is order and waiting. Near a hosts' share "
        "of 100 %, a run is bound by its launches. Settled are runs whose last two steps agree within a twentieth.",
        "ranks {num_ranks} | sharing {sharing} | dtype {dtype} | schedule {schedule} | "
        "makespan, ms (simulated) {makespan_ms} | bubble (simulated) {bubble_fraction} | "
        "computing {compute_share:.0%} | hosts' share {hosts} | settled {settled} | MHz {mhz}",
        of("runs", _simulated),
        of_gpus=True,
    ),
    Shape(
        "where",
        "runs",
        "Where the time of a step went, as the mean of the ranks.",
        "ranks {num_ranks} | sharing {sharing} | dtype {dtype} | schedule {schedule} | shares {shares}",
        of("runs", _where),
        of_gpus=True,
    ),
    Shape(
        "paced",
        "paced",
        "Paced runs. Every action is stretched to one duration: order and waits are the schedule's, times say nothing "
        "of speed.",
        "ranks {num_ranks} | schedule {schedule} | an action, ms {pace_ms:.1f} | measured, ms {makespan_ms:.1f} | "
        "simulated, ms {predicted_makespan_ms:.1f} | ratio {ratio:.3f}",
        of("paced", lambda row: {"ratio": row["makespan_ms"] / row["predicted_makespan_ms"]}),
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
        "profile",
        "profile",
        "Three ranks, eight microbatches, DistilBERT: means over the ranks of their torch.profiler traces, which slow "
        "every operation. Communication, as a share of it and compute, contains "
        "waiting.",
        "sharing {sharing} | workload {workload} | schedule {schedule} | runtime {engine} | "
        "step ms {slowest:.1f} | compute {utilisation:.1%} | communication {communication_share:.1%} | "
        "overlapped {overlap_share:.1%}",
        of("profile", _profile),
    ),
    Shape(
        "clocks",
        "clocks",
        "Clock of the multiprocessors, power and temperature, read after each row. Figures whose clocks differ aren't "
        "to be compared.",
        "part {part} | rows {rows} | MHz {sm} | W {power} | Celsius {celsius}",
        _clocks,
        of_gpus=True,
    ),
    Shape(
        "tests",
        "tests",
        "The runtime's tests on the GPUs.",
        "passed {passed} | failed {failed} | skipped {skipped}",
        _tests,
        of_gpus=True,
    ),
    Shape(
        "not run",
        "of what wasn't run",
        "What failed in the recorded runs or was left out.",
        "not run {what} | because {why}",
        _not_run,
    ),
)


def tables(folder: Path | str | None = None) -> Tables:
    """All tables of the recordings in a folder that have something in them, by name."""
    recordings = load(folder)
    found = {shape.name: shape.table(recordings) for shape in SHAPES}
    return Tables({name: table for name, table in found.items() if table})


if __name__ == "__main__":
    print(tables(*sys.argv[1:2]))
