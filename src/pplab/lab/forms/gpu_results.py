"""Tables of what `make gpu` finds beside the times of its runs: the machine, whether it computes right, what is assumed
of it, its links and clocks, and runs beside their simulation."""

from __future__ import annotations

import re
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from .json_form import reading
from .results import Recording, Results, load


def machines(folder: Path | str | None = None) -> Results:
    """The machines: GPUs, driver, versions, and what a reader of their results should know."""
    rows = []
    for recording in _of_gpus(folder):
        with reading(str(recording.path), "what `make gpu` records of a machine"):
            box, versions = recording.data["box"], recording.data["versions"]
            (device, *_), (check, *_) = box["devices"], [p for p in recording.data["parts"] if p["name"] == "check"]
            rows.append(
                (
                    recording.title(),
                    f"{device['memory_bytes'] / 1e9:.0f} GB, {device['compute_capability']}",
                    box["driver"] or "-",
                    ", ".join(f"{name} {versions[name] or '-'}" for name in ("torch", "cuda", "nccl")),
                    "; ".join(check.get("problems", ())) or "-",
                )
            )
    return Results(("device, date", "memory, capability", "driver", "versions", "notes"), rows, "The machines.")


def first_look(folder: Path | str | None = None) -> tuple[str, list[str]] | None:
    """What the part `smoke` printed where it was recorded last, and on what and when; None where it wasn't."""
    found = [each for each in _of_gpus(folder) if each.rows("smoke")]
    if not found:
        return None
    last = max(found, key=lambda recording: recording.data["date"])
    with reading(str(last.path), "what `make gpu` records in its part smoke"):
        return last.title("smoke"), [row["says"] for row in last.rows("smoke")]


def gradients(folder: Path | str | None = None) -> Results:
    """Whether every schedule computes what one process does, and holds the bytes that it should: of a tiny model."""
    found: dict[tuple[str, ...], dict[str, Mapping]] = defaultdict(dict)
    for recording in _of_gpus(folder):
        for part in ("smoke", "gradients"):
            with reading(str(recording.path), f"what `make gpu` records in its part {part}"):
                for row in recording.rows(part):
                    key = recording.title(part), str(row["num_ranks"]), row["dtype"], row["transport"]
                    found[key][row["schedule"]] = row
    rows = []
    for key, of in found.items():
        wrong = [name for name, row in of.items() if row["wrong"]]
        largest = max(row["difference"] for row in of.values())
        rows.append((*key, f"{len(of) - len(wrong)} of {len(of)}", f"{largest:.1e}", ", ".join(wrong) or "-"))
    return Results(
        ("device, date", "ranks", "dtype", "messages", "schedules right", "largest difference", "wrong"),
        rows,
        "A tiny GPT under every schedule: gradients beside those of one process, and bytes beside the schedule's.",
    )


def assumptions(folder: Path | str | None = None) -> Results:
    """What the runtime takes from NVIDIA's documents, and what was found."""
    return _table(
        folder,
        "assumptions",
        {
            "assumption": lambda row: row["assumption"],
            "expected": lambda row: _yes(row["expected"]),
            "found": lambda row: _yes(row["found"]),
            "agrees": lambda row: _yes(row["agrees"]),
            "measured": lambda row: _figures(row["measured"]),
            "expected by": lambda row: row["documents"],
        },
        "What the runtime takes from NVIDIA's documents, tried.",
    )


def nccl(folder: Path | str | None = None) -> Results:
    """Ranks on one GPU that send by NCCL: whether receives that wait beside each other end."""
    return _table(
        folder,
        "nccl",
        {
            "ranks": lambda row: str(row["num_ranks"]),
            "sharing": lambda row: row["sharing"],
            "schedule": lambda row: row["schedule"],
            "the run": lambda row: "ends" if row["ended"] else row["said"].splitlines()[0],
            "s": lambda row: f"{row['seconds']:.1f}",
        },
        "Ranks on one GPU that send by NCCL: do receives that wait there beside each other end?",
    )


def links(folder: Path | str | None = None) -> Results:
    """What messages take between ranks: the line through the times of some sizes, and these times."""
    return _table(
        folder,
        "links",
        {
            "ranks": lambda row: " and ".join(map(str, row["pair"])),
            "messages": lambda row: row["transport"],
            "latency, us": lambda row: f"{row['latency_ms'] * 1e3:.1f}",
            "GB/s": lambda row: f"{row['bytes_per_ms'] / 1e6:.2f}",
            "one way": lambda row: ", ".join(f"{_bytes(n)} {ms:.3g} ms" for n, ms in row["ms_of_bytes"].items()),
        },
        "Messages from rank to rank. By gloo, they go through the host's memory.",
    )


def batch(folder: Path | str | None = None) -> Results:
    """The batch of the measured GPT, and how full the card is by its bytes."""
    return _table(
        folder,
        "batch",
        {
            "sequences": lambda row: str(row["batch_size"]),
            "room for": lambda row: str(row.get("most", "-")),
            "GB at most, of": lambda row: (
                f"{row['needed'] / 1e9:.1f} of {row['card_bytes'] / 1e9:.1f}" if "needed" in row else "-"
            ),
        },
        "The measured GPT's batch: so large that every stage's forward takes its time, as far as there is room.",
    )


def simulated(folder: Path | str | None = None) -> Results:
    """Every run beside the simulation of its schedule with its own durations, and whether its times can be trusted."""
    return _table(
        folder,
        "runs",
        {
            "ranks": lambda row: str(row["num_ranks"]),
            "sharing": lambda row: row["sharing"],
            "dtype": lambda row: row["dtype"],
            "schedule": lambda row: row["schedule"],
            "makespan, ms (simulated)": lambda row: _beside(row, "makespan_ms", ".1f"),
            "bubble (simulated)": lambda row: _beside(row, "bubble_fraction", ".3f"),
            "computing": lambda row: f"{row['compute_share']:.0%}",
            "hosts' share": lambda row: f"{max(row['hosts_share']):.0%}" if row.get("hosts_share") else "-",
            "settled": lambda row: _yes(row.get("settled")),
            "MHz": lambda row: _span(row.get("clocks", ()), "sm"),
        },
        "Runs beside their simulation with their own durations: what differs is order and waiting. Near a hosts' share "
        "of 100 %, a run is bound by its launches. Settled are runs whose last two steps agree within a twentieth.",
    )


def where(folder: Path | str | None = None) -> Results:
    """Where the time of every run's steps went, as shares."""
    causes = dict.fromkeys(
        cause for recording in _of_gpus(folder) for row in recording.rows("runs") for cause in row.get("where", ())
    )
    columns = {
        "ranks": lambda row: str(row["num_ranks"]),
        "sharing": lambda row: row["sharing"],
        "dtype": lambda row: row["dtype"],
        "schedule": lambda row: row["schedule"],
    }
    for cause in causes:
        columns[cause] = lambda row, cause=cause: _share(row.get("where", {}), cause)
    return _table(folder, "runs", columns, "Where the time of a step went, as the mean of the ranks.")


def clocks(folder: Path | str | None = None) -> Results:
    """The GPUs' clock, power and temperature behind the rows of each part: from the least to the most."""
    rows = []
    for recording in _of_gpus(folder):
        for part in recording.data["parts"]:
            with reading(str(recording.path), f"what `make gpu` records in its part {part['name']}"):
                found = [gpu for row in part["rows"] for gpu in row.get("clocks", ())]
                if found:
                    spans = (_span(found, name) for name in ("sm", "power", "celsius"))
                    rows.append((recording.title(part["name"]), part["name"], str(len(part["rows"])), *spans))
    return Results(
        ("device, date", "part", "rows", "MHz", "W", "Celsius"),
        rows,
        "Clock of the multiprocessors, power and temperature, read after each row. Figures whose clocks differ aren't "
        "to be compared.",
    )


def tests(folder: Path | str | None = None) -> Results:
    """What came of the runtime's tests on the GPUs."""
    rows = []
    for recording in _of_gpus(folder):
        if found := Counter(row["outcome"] for row in recording.rows("tests") if "outcome" in row):
            outcomes = (str(found[outcome]) for outcome in ("passed", "failed", "skipped"))
            rows.append((recording.title("tests"), *outcomes))
    return Results(("device, date", "passed", "failed", "skipped"), rows, "The runtime's tests on the GPUs.")


def _of_gpus(folder: Path | str | None) -> list[Recording]:
    """Recordings of GPUs: what other commands record may have parts of the same names."""
    return [each for each in load(folder) if each.data["kind"] == "cuda"]


def _table(folder: Path | str | None, part: str, columns: Mapping[str, Callable[[Mapping], str]], says: str) -> Results:
    """What was measured on GPUs in one part: by heading, what to show of a row."""
    rows: list[tuple[str, ...]] = []
    for recording in _of_gpus(folder):
        with reading(str(recording.path), f"what `make gpu` records in its part {part}"):
            rows += [(recording.title(part), *(show(row) for show in columns.values())) for row in recording.rows(part)]
    return Results(("device, date", *columns), rows, says)


def _yes(value: bool | None) -> str:
    return "-" if value is None else "yes" if value else "NO"


def _beside(row: Mapping, figure: str, form: str) -> str:
    """What was measured, and in brackets what was simulated where it could be."""
    simulated = f" ({row['predicted'][figure]:{form}})" if "predicted" in row else ""
    return f"{row['measured'][figure]:{form}}{simulated}"


def _share(parts: Mapping[str, float], of: str) -> str:
    return f"{parts[of] / sum(parts.values()):.1%}" if of in parts else "-"


def _figures(measured: Mapping[str, float | Sequence[float]]) -> str:
    """Figures by name; of several, their median."""
    medians = {name: [figure] if isinstance(figure, (int, float)) else figure for name, figure in measured.items()}
    return ", ".join(f"{name} {statistics.median(found):.3g}" for name, found in medians.items())


def _bytes(count: str) -> str:
    """A number of bytes, a power of two, in words."""
    size = int(count)
    return f"{size} B" if size < 2**10 else f"{size / 2**10:g} KiB" if size < 2**20 else f"{size / 2**20:g} MiB"


def _span(found: Iterable[Mapping[str, str]], name: str) -> str:
    """From the least to the most of what nvidia-smi says of the GPUs, without its unit; - where it doesn't know."""
    figures = [float(match[0]) for each in found if (match := re.match(r"[\d.]+", each.get(name, "")))]
    low, high = (f"{pick(figures, default=0):.0f}" for pick in (min, max))
    return "-" if not figures else low if low == high else f"{low} to {high}"


OF_MACHINES = (machines, gradients, assumptions, nccl, links, batch)
OF_RUNS = (simulated, where)
OF_CHECKS = (clocks, tests)
