"""Time against memory on four ranks: what every published schedule takes and holds, and what is possible at all.

python benchmarks/frontier.py [--seconds 60] [--only NAME] [--out results/frontier.json]

For every setting (times, latency, microbatches), placement and memory limit, it finds the shortest order that CP-SAT
finds in `--seconds` on one worker, and the bound. It starts with the best that is known: the orders in the file, for
whatever times; those for half as many microbatches, twice in a row; that of the next lower limit; and what `lab.search`
finds. So none gets longer. Proofs in the file for the same problem aren't repeated, and bounds are kept, so a second
run spends its seconds on what is open. Every point has the processor seconds spent on it in all, and what was known
after how many. A proved time is the same on every machine, whichever order reaches it. A time that isn't proved may
change on a faster machine or with more patience.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from math import inf
from pathlib import Path

import records
from frontier_settings import SETTINGS, P, Setting

import pplab as pp
from pplab import lab
from pplab.lab.searches import CLOSE, COMMAND

ROOT = Path(__file__).parents[1]


def points(setting: Setting, seconds: float, parts: Sequence[dict]) -> Iterator[dict]:
    """Of all placements: the published schedules, then the best order in every limit, no longer than in `parts`."""
    same, half = (orders(parts, M) for M in (setting.num_microbatches, setting.num_microbatches / 2))
    done, seen = recorded(setting, parts), set()
    for problem, limits in setting.problems():
        if problem.placement not in seen:
            seen.add(problem.placement)
            for timeline in problem.published():
                schedule = timeline.schedule
                yield {
                    "name": schedule.name,
                    "placement": problem.placement,
                    "split": pp.Kind.W in schedule.columns.kinds,
                    "time": tidy(timeline.makespan),
                    "held": tidy(max(schedule.peak_held(problem.memory)) * scale(setting)),
                    "rows": [" ".join(map(str, row)) for row in schedule.rows],
                }
        start = [*same, *(twice(order, problem) for order in half if order.num_stages == problem.num_stages)]
        known = {limit: row for (*look, limit), row in done.items() if look == [problem.placement, problem.split]}
        yield from best(problem, limits, seconds, start, known, scale(setting))


def best(
    problem: lab.Problem,
    limits: Iterable[float],
    seconds: float,
    start: Sequence[pp.Schedule] = (),
    known: dict[float, dict] | None = None,
    scale: float = 1,
) -> list[dict]:
    """The shortest order in every one of `limits`, the smallest first. Each is where the next one starts.

    `known` are the rows that a recording of this problem has, by their limit times `scale`. It ends early once an order
    is as short as any of this placement, because more memory can't make one shorter. Limits that nothing meets are left
    out.
    """
    free, before, rows = lab.floor(replace(problem, limit=None)).value, [*start], []
    for limit in sorted(limits):
        if limit >= max(problem.least_limit):
            row = (known or {}).get(tidy(limit * scale))
            if not row or not row["proved"]:
                row = proved(replace(problem, limit=limit), seconds, before, row or {}, scale)
            row["final"] = row["time"] <= free * (1 + CLOSE)
            rows.append(row)
            before.append(pp.Schedule([each.split() for each in row["rows"]]))
            if row["final"]:
                break
    for less, more in reversed([*pairwise(rows)]):  # less memory makes nothing shorter
        less["bound"] = min(max(less["bound"], more["bound"]), less["time"])
    for row in rows:
        row["proved"] = row["time"] <= row["bound"] * (1 + CLOSE)
        row["name"] = "proved" if row["proved"] else "found"
    return rows


def proved(problem: lab.Problem, seconds: float, start: Sequence[pp.Schedule], known: dict, scale: float) -> dict:
    """A row with the best order in the problem's limit, and what is proved about it."""
    began, start, progress = time.process_time() - known.get("seconds", 0), [*start], [*known.get("progress", ())]

    def tell(now: lab.BestSoFar) -> None:
        """Print a row. Times and bounds from a recording are as good as new ones."""
        best, bound = min(now.value, known.get("time", inf)), max(now.bound, known.get("bound", 0))
        if not progress or progress[-1][1:] != [tidy(best), tidy(bound)]:
            progress.append([round(time.process_time() - began, 1), tidy(best), tidy(bound)])

    if problem.split and problem.placement != "bidirectional":
        asked = {name: getattr(problem, name) for name in ("placement", "costs", "memory", "limit")}
        start.append(lab.search(problem.num_ranks, problem.num_microbatches, **asked).schedule)
    found = lab.optimum(problem, start=start, time_limit=seconds, workers=1, on_progress=tell)
    tell(lab.BestSoFar(found.seconds, found.value, found.bound))
    return {
        "placement": problem.placement,
        "split": problem.split,
        "limit": tidy(problem.limit * scale),
        "time": progress[-1][1],
        "bound": min(progress[-1][1:]),
        "held": tidy(max(found.schedule.peak_held(problem.memory)) * scale),
        "seconds": progress[-1][0],
        "progress": progress,
        "rows": [" ".join(map(str, row)) for row in found.schedule.rows],
    }


def orders(parts: Iterable[dict], num_microbatches: float) -> list[pp.Schedule]:
    """All orders that were found for so many microbatches, for any times and limits."""
    same = [row for part in parts if part["num_microbatches"] == num_microbatches for row in part["rows"]]
    return [pp.Schedule([each.split() for each in row["rows"]]) for row in same if "limit" in row]


def twice(order: pp.Schedule, problem: lab.Problem) -> pp.Schedule:
    """An order for half of the problem's microbatches, twice in a row. It holds no more."""
    half = replace(problem, num_microbatches=problem.num_microbatches // 2, limit=None)
    again = [
        {m: new.microbatches[j + k * len(old.microbatches)] for j, m in enumerate(old.microbatches)}
        for k in (0, 1)
        for old, new in zip(half.streams, problem.streams, strict=True)
    ]
    number = [again[k * len(half.streams)] | again[(k + 1) * len(half.streams) - 1] for k in (0, 1)]
    return pp.Schedule([[a._replace(microbatch=of[a.microbatch]) for of in number for a in row] for row in order.rows])


def recorded(setting: Setting, parts: Iterable[dict]) -> dict[tuple, dict]:
    """The rows that were found for these times and sizes, by placement, split and limit."""
    said = [part for part in parts if part["name"] == setting.name and about(part) == about(describe(setting))]
    found = [row for part in said for row in part["rows"] if "limit" in row]
    return {(row["placement"], row["split"], row["limit"]): row for row in found}


def about(part: dict) -> str:
    return json.dumps(tidied([part["costs"], part.get("memory")]), sort_keys=True)


def describe(setting: Setting) -> dict:
    """What a setting is about, and for the case what its ranks hold."""
    problems = {problem.placement: problem for problem, _ in setting.problems()}
    said = {
        "num_ranks": P,
        "num_microbatches": setting.num_microbatches,
        "costs": {placement: plainly(problem.costs) for placement, problem in problems.items()},
    }
    if not setting.costs:
        said["memory"] = {placement: plainly(problem.memory) for placement, problem in problems.items()}
    return said


def scale(setting: Setting) -> float:
    return 1 if setting.costs else 1e-9


def plainly(given: pp.Costs | pp.Memory) -> dict:
    """The fields of some costs or memory that aren't left out. For a link they are its ranks, latency and bandwidth."""
    values = {each.name: getattr(given, each.name) for each in fields(given)}
    said = {name: value for name, value in values.items() if value != getattr(type(given)(), name)}
    if said.get("links"):
        said["links"] = [[*ranks, link.latency, link.bandwidth] for ranks, link in given.links.items()]
    return said


def tidy(number: float) -> float:
    return float(f"{number:.9g}")


def tidied(data: object) -> object:
    """Plain JSON values without the last digits, which depend on the order of multiplications."""
    if isinstance(data, dict):
        return {name: tidied(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [tidied(value) for value in data]
    return tidy(data) if isinstance(data, float) else data


def main() -> int:
    """Compute what is asked for, and write each setting as soon as it is done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60, help="for each placement and limit that is open")
    parser.add_argument("--only", nargs="*", help=f"of {', '.join(SETTINGS)}")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "frontier.json")
    given = parser.parse_args()
    parts = json.loads(given.out.read_text())["parts"] if given.out.exists() else []
    for name in given.only or SETTINGS:
        setting = SETTINGS[name]
        began, rows = time.perf_counter(), []
        for row in points(setting, given.seconds, parts):
            rows.append(row)
            said = f"not below {row['bound']:g}" if not row.get("proved", True) else ""
            print(f"{setting.name:12} {row['placement']:20} {row['name']:22}", end=" ")
            print(f"{row['time']:9g} holds {row['held']:7g} of {row.get('limit', '-'):7} {said}", flush=True)
        part = {
            "name": setting.name,
            "state": "done",
            "seconds": round(time.perf_counter() - began),
            "title": setting.title,
            "unit": setting.unit,
            "held_in": "microbatches' activations" if setting.costs else "GB",
            **describe(setting),
            "rows": rows,
        }
        parts = [each for each in parts if each["name"] != setting.name] + [part]
        record(given.out, parts)
    return 0


def record(path: Path, parts: list[dict]) -> None:
    """Write what there is. What isn't proved depends on the machine."""
    import ortools

    versions = {"pplab": pp.__version__, "python": sys.version.split()[0], "ortools": ortools.__version__}
    records.write(path, parts, device="any machine", command=COMMAND, versions=versions)


if __name__ == "__main__":
    sys.exit(main())
