"""Time against memory, on four ranks: what every published schedule takes and holds, and what is possible at all.

python benchmarks/frontier.py [--seconds 10] [--only NAME] [--out results/frontier.json]

For every setting (times, latency, microbatches), placement and memory limit: the shortest order that CP-SAT finds in
`--seconds` on `--workers` threads, and the bound. It begins with the orders that the file has, at whatever times, so
none gets longer. What is proved takes as long on every machine, whichever order it is; where the solver ran out of
time, a faster one may find more, and the file says which these are. Of its seconds nothing follows.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import fields, replace
from pathlib import Path

from frontier_settings import SETTINGS, P, Setting

import pplab as pp
from pplab import lab
from pplab.lab.searches import CLOSE, COMMAND

ROOT = Path(__file__).parents[1]


def points(setting: Setting, seconds: float, workers: int, recorded: list[dict]) -> Iterator[dict]:
    """Of all placements: the published schedules, then the best order in every limit, no longer than the recorded."""
    seen, start = set(), [pp.Schedule([row.split() for row in each["rows"]]) for each in recorded if "limit" in each]
    for problem, limits in setting.problems():
        scale = 1 if setting.costs else 1e-9
        if problem.placement not in seen:
            seen.add(problem.placement)
            for timeline in problem.published():
                schedule = timeline.schedule
                split = pp.Kind.W in schedule.columns.kinds
                yield {
                    "name": schedule.name,
                    "placement": problem.placement,
                    "split": split,
                    "time": tidy(timeline.makespan),
                    "held": tidy(max(schedule.peak_held(problem.memory)) * scale),
                    "rows": [" ".join(map(str, row)) for row in schedule.rows],
                }
        free = lab.floor(problem).value
        for found in optima(problem, limits, start=start, time_limit=seconds, workers=workers):
            yield {
                "name": "proved" if found.proved else "found",
                "placement": problem.placement,
                "split": problem.split,
                "limit": tidy(found.problem.limit * scale),
                "time": tidy(found.value),
                "bound": tidy(found.bound),
                "proved": found.proved,
                "final": found.value <= free * (1 + CLOSE),
                "held": tidy(max(found.schedule.peak_held(problem.memory)) * scale),
                "rows": [" ".join(map(str, row)) for row in found.schedule.rows],
            }


def optima(
    problem: lab.Problem, limits: Iterable[float], *, start: Sequence[pp.Schedule] = (), **options: object
) -> Iterator[lab.Optimum]:
    """The shortest order in every one of `limits`, the smallest first: each is where the next one starts.

    `start` and the other options are those of `lab.optimum`. It ends early: with an order that is as short as any of
    this placement, for which no memory at all would make one shorter. Limits that nothing meets are left out.
    """
    free, before = lab.floor(replace(problem, limit=None)).value, [*start]
    for limit in sorted(limits):
        if limit < max(problem.least_limit):
            continue
        found = lab.optimum(replace(problem, limit=limit), start=before, **options)
        yield found
        before.append(found.schedule)
        if found.value <= free * (1 + CLOSE):
            return


def plainly(costs: pp.Costs) -> dict:
    """What isn't left out of some costs; of a link its ranks, latency and bandwidth."""
    given = {each.name: getattr(costs, each.name) for each in fields(costs)}
    said = {name: value for name, value in given.items() if value != getattr(pp.Costs(), name)}
    if costs.links:
        said["links"] = [[*ranks, link.latency, link.bandwidth] for ranks, link in costs.links.items()]
    return said


def tidy(number: float) -> float:
    return float(f"{number:.9g}")


def main() -> int:
    """Compute what is asked for, and write it as soon as a setting is done."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=10, help="for each placement and limit")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--only", nargs="*", help=f"of {', '.join(SETTINGS)}")
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "frontier.json")
    given = parser.parse_args()
    parts = json.loads(given.out.read_text())["parts"] if given.out.exists() else []
    for setting in SETTINGS.values():
        if given.only and setting.name not in given.only:
            continue
        began, rows = time.perf_counter(), []
        same = [part for part in parts if part["num_microbatches"] == setting.num_microbatches]  # at whatever times
        before = [row for part in same for row in part["rows"]]
        for row in points(setting, given.seconds, given.workers, before):
            rows.append(row)
            said = f"not below {row['bound']:g}" if not row.get("proved", True) else ""
            print(f"{setting.name:12} {row['placement']:20} {row['name']:22}", end=" ")
            print(f"{row['time']:9g} holds {row['held']:7g} of {row.get('limit', '-'):7} {said}", flush=True)
        part = {
            "name": setting.name,
            "state": "done",
            "seconds": round(time.perf_counter() - began),
            "title": setting.title,
            "num_ranks": P,
            "num_microbatches": setting.num_microbatches,
            "unit": setting.unit,
            "held_in": "microbatches' activations" if setting.costs else "GB",
            "costs": {problem.placement: plainly(problem.costs) for problem, _ in setting.problems()},
            "rows": rows,
        }
        parts = [each for each in parts if each["name"] != setting.name] + [part]
        record(given.out, parts, given.seconds)
    return 0


def record(path: Path, parts: list[dict], seconds: float) -> None:
    """Write what there is. What isn't proved depends on the machine; `seconds` are of two busy cores."""
    import ortools

    versions = {"pplab": pp.__version__, "python": sys.version.split()[0], "ortools": ortools.__version__}
    box = {"seconds_per_limit": seconds}
    lab.results.write(path, parts, device="any machine", command=COMMAND, versions=versions, box=box)


if __name__ == "__main__":
    sys.exit(main())
