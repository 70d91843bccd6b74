"""Attack the runtime and whatever reads files and links, and record the results in results/attacks.json.

`make attack` runs every attack of tests/attacks, and the damages of checkpoints, with far more tries than the tests.
Results are written after each attack, so that nothing is lost. `python tools/attack.py ranks saves` repeats some and
keeps the others, and `--part 0.1` tries a tenth as often. The page "When processes die" shows what was recorded.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from pathlib import Path

from pplab.runtime.pool import versions

ROOT = Path(__file__).parents[1]
SEED = 2026
TRIES = {  # of each row, but for the last two of all: what takes some twenty minutes
    "ranks": 40,
    "owner": 12,
    "interrupts": 40,
    "saves": 200,
    "surroundings": 3,
    "growth": 30,
    "damage": 12_000,
    "links": 60,
    "schedules": 30_000,
    "calls": 20_000,
}


def main(arguments: list[str] | None = None) -> int:
    """Attack and record. Returns 1 if something wasn't as it must be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("attacks", nargs="*", choices=[*TRIES, []], help="which ones (all)")
    parser.add_argument("--part", type=float, default=1.0, help="of the tries")
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--out", type=Path, default=ROOT / "results" / "attacks.json")
    given = parser.parse_args(arguments)
    places = ("tests/attacks", "tests/lab/checkpoints", "tests", "benchmarks")
    sys.path[:0] = [str(ROOT / place) for place in places]
    recorded = {part["name"]: part for part in json.loads(given.out.read_text())["parts"]} if given.out.exists() else {}
    wrong = 0
    for name in given.attacks or TRIES:
        if (rows := _rows(name, max(1, round(TRIES[name] * given.part)), given.seed, recorded)) is not None:
            wrong += sum(map(is_wrong, rows))
            _write(given.out, recorded)
    print(f"== {given.out}: {wrong} rows aren't as they must be" if wrong else f"== {given.out}")
    return int(wrong > 0)


def is_wrong(row: dict) -> bool:
    """Whether a try of this row went wrong."""
    return row["wrong"] not in (0, [])


def _rows(name: str, tries: int, seed: int, recorded: dict[str, dict]) -> list[dict] | None:
    """Run one attack and add its part to the others. None if a tool for it is missing, such as a browser."""
    from _pytest.outcomes import Skipped

    print(f"== {name}: {tries} tries of each", flush=True)
    started = time.monotonic()
    try:
        rows = importlib.import_module(f"test_{name}").attack(tries, seed)
    except Skipped as skipped:
        print(f"   not tried: {skipped}")
        return None
    seconds = round(time.monotonic() - started, 1)
    for row in rows:
        mark = "WRONG" if is_wrong(row) else "     "
        print(f"   {mark} {row['what']}: {row['tried']} tried; {row['seen']}"[:200], flush=True)
        if mark != "     ":
            print(f"         {json.dumps(row)}", flush=True)
    recorded[name] = {"name": name, "state": "done", "seconds": seconds, "rows": rows}
    return rows


def _write(path: Path, recorded: dict[str, dict]) -> None:
    """Write a recording in the form that `pplab.lab.results` reads. It has no date, because the tests keep it true."""
    import records

    cores = len(os.sched_getaffinity(0))
    parts = [recorded[name] for name in TRIES if name in recorded]
    device, box = f"a machine of {cores} cores, without a GPU", {"cores": cores}
    records.write(path, parts, device=device, command="make attack", versions=versions(), box=box)


if __name__ == "__main__":
    sys.exit(main())
