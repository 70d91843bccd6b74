"""`make gpu`: check a machine with CUDA devices, measure on it, and write results/<device>.json.

    python benchmarks/gpu.py [--device cuda|cpu] [--size full|small] [--only PART ...] [--folder FOLDER]
                             [--deadline SECONDS]

Every row is written as soon as it is measured, so a failure or an interrupt later loses nothing. The file of an earlier
run is replaced when all parts have had their turn. Until then the rows are in `.unfinished`, and the same command on
the same machine goes on with it. Delete it to start from the beginning. Parts come in the order of their worth, which
differs between one GPU and several. With --deadline, the command ends in time whatever runs. Each part first gets some
seconds, and the rest goes to those that aren't done, in order. What remains is measured when you give the command
again. With --only, the file keeps its other parts, and `--only smoke` takes half a minute. Whatever is not run is
printed with its reason and listed in the file. The exit status is 1 when anything failed. `--device cpu` tries the
command itself and measures nothing about a GPU. With `--size cores`, it measures the processor, which `make bench`
does.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing import forkserver
from pathlib import Path

import gpu_needs

gpu_needs.require()  # before what imports torch

# ruff: noqa: E402
import gpu_box
import gpu_tests
import torch
from gpu_parts import PARTS, in_order
from gpu_setting import LATE, ROOT, SIZES, Late, Part, Piece, Setting, for_machine

from pplab.lab import results
from pplab.runtime import gpu as door
from pplab.runtime.devices import usable_gpus

NOT_REACHED = "it was not reached"
_CLOSING_S = 10  # of a deadline, for ending the ranks and writing the file; a tenth of short ones
_MORE_S = 30.0  # than its own that a part may take for the row that is under way
_AGAIN_S = 3.0  # who doesn't stop when the time is up is told again


def measure(
    setting: Setting,
    path: Path,
    command: str,
    only: tuple[str, ...] = (),
    parts: Mapping[str, Piece] | None = None,
) -> dict:
    """Run the parts, write the file, and return its content. With `only`, it keeps its other parts.

    Until all parts have had their turn, the rows are in a separate file, `.unfinished`.
    """
    parts = in_order(PARTS if parts is None else parts, setting.num_devices if setting.device == "cuda" else 1)
    unfinished = path.with_suffix("".join(f".{name}" for name in only) + ".unfinished")
    box = gpu_box.facts(setting.device)
    missing = gpu_needs.missing(parts)
    print(*filter(None, (gpu_needs.show(parts), gpu_box.show(box))), sep="\n", flush=True)
    data = {
        "form": results.FORM,
        "device": box["devices"][0]["name"],
        "kind": setting.device,
        "date": _now(),
        "command": command,
        "versions": box["versions"],
        "box": box,
    }
    reason = f"only {', '.join(only)} was asked for" if only else NOT_REACHED
    kept = _kept(path, data) if only else {}
    begun = _begun(unfinished, data)
    asked = [name for name in parts if not only or name in only]
    found = {name: kept.get(name) or _not_reached(name, reason) for name in parts}
    found |= {name: begun.get(name) or _not_reached(name, NOT_REACHED) for name in asked}

    def save(name: str, said: dict, left_out: list[dict]) -> None:
        found[name] = said, left_out
        data["not_run"] = [each for _, left_out in found.values() for each in left_out]
        data["parts"] = [each for each, _ in found.values()]
        write(unfinished, data)

    save(first := next(iter(parts)), *found[first])
    for name in (name for name in parts if name not in asked):
        print(f"{'kept' if name in kept else 'not run'}: {name}: {reason}", flush=True)
    for name in (name for name in asked if name in missing):
        print(f"not run: {name}: {missing[name]}", flush=True)
        save(name, *_not_reached(name, missing[name]))

    def write_what_is_there() -> None:
        where = unfinished if not only and _is_whole_file(path) else path  # no part takes the place of a whole
        if where == path:
            write(path, data)
        print(f"== what there is so far is in {where}, and the same command goes on with it", flush=True)

    with _ended_at(setting.end, write_what_is_there):
        for name, until in _turns(
            {name: parts[name] for name in asked if name not in missing}, found, setting.deadline
        ):
            print(f"== {name}: {parts[name].says}", flush=True)
            sized = setting.with_batch(found["batch"][0].get("batch_size") if "batch" in found else None)
            with suppress(Late):  # rung for when it was over already
                _run_part(name, parts[name], sized, until, data, partial(save, name), found[name][0])
    if any(_lacks(found[name][1]) for name in asked):
        if setting.deadline:
            _end_helpers()
        write_what_is_there()
    else:
        unfinished.replace(path)
        print(f"== wrote {path}")
    return data


def _turns(parts: Mapping[str, Piece], found: dict, deadline: float | None) -> Iterator[tuple[str, float | None]]:
    """The parts that lack something, in order, and until when each may run. With a deadline, each first gets its own
    seconds, less those that it had in earlier commands, or as much of them as leaves time for all. The rest goes to
    those that then still lack something."""
    done = {name for name in parts if found[name][0]["state"] == "done" and not _lacks(found[name][1])}
    for name in done:
        print(f"kept: {name}: it was done before", flush=True)
    own = {name: max(0, parts[name].seconds - found[name][0]["seconds"]) for name in parts if name not in done}
    share = min(1, (deadline - time.monotonic()) / (sum(own.values()) or 1)) if deadline else 1
    for first in (True, False) if deadline else (False,):
        for name in (name for name in parts if name not in done):
            until = deadline
            if first:
                until = min(until, time.monotonic() + share * own[name])
            if until is None or time.monotonic() < until:
                yield name, until
                done |= set() if _lacks(found[name][1]) else {name}


def _lacks(left_out: list[dict]) -> bool:
    """Whether there wasn't enough time for all that could be measured."""
    return any(each["why"] in (NOT_REACHED, LATE) for each in left_out)


def _is_whole_file(path: Path) -> bool:
    try:
        return not _lacks(json.loads(path.read_text())["not_run"])
    except (OSError, ValueError, KeyError):
        return False


def _run_part(
    name: str, piece: Piece, setting: Setting, until: float | None, data: dict, save: Callable, begun: dict
) -> None:
    """Run one part until then at most, and save it after every row. Rows in `begun` aren't measured again."""
    part, date, started = Part(name, [], until), _now(), time.monotonic()
    part.take(begun)
    part.more = {key: begun[key] for key in ("batch_size",) if key in begun}
    if setting.device == "cuda":
        part.beside = gpu_box.clocks

    def added(*, rest: bool = True) -> None:
        took = time.monotonic() - started
        # Who is ended in the middle of a part has used up its first turn, so that one that hangs isn't the first again.
        said = part.to_dict(begun.get("seconds", 0) + (max(took, piece.seconds) if rest else took))
        save({**said, "date": date, "by": data["command"]}, part.left_out + [_rest(part)] * rest)

    part.added = added
    added()
    if until is not None:  # a row that is under way may end, as far as there is time for it
        _ring_at(min(until + min(piece.seconds, _MORE_S), setting.deadline))
    try:
        piece.run(setting, part)
    except Late as late:
        part.leave_out(_follows(part), str(late))
    except Exception as error:  # a part that fails loses neither its own rows nor the other parts'
        part.errors.append("".join(traceback.format_exception(error))[-4000:])
        print(f"FAILED: {name}: {error}", flush=True)
    finally:
        _ring_at(None)
    added(rest=False)


def _begun(path: Path, data: dict) -> dict[str, tuple[dict, list[dict]]]:
    """The parts that an interrupted run of the same command has measured here, and what each of them left out."""
    try:
        older = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    commands = [re.sub(r" --deadline \S+", "", each["command"]) for each in (older, data)]
    if not _is_of_here(older, data) or len(set(commands)) > 1:
        print(f"{path} is of another command, machine or version: everything is measured anew", flush=True)
        return {}
    print(f"going on with {path}: delete it to measure everything anew", flush=True)
    return _parts(older)


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _not_reached(name: str, reason: str) -> tuple[dict, list[dict]]:
    left_out = [{"what": f"{name}: all of it", "why": reason}]
    return {"name": name, "state": "not run", "seconds": 0, "rows": []}, left_out


def _rest(part: Part) -> dict:
    """What a part lacks while it runs."""
    return {"what": f"{part.name}: {_follows(part)}", "why": NOT_REACHED}


def _follows(part: Part) -> str:
    count = len({*part.names, *part.begun})
    return f"what follows its {count} rows" if count else "all of it"


def _kept(path: Path, data: dict) -> dict[str, tuple[dict, list[dict]]]:
    """The parts that a file has of the same machine with the same versions, and what each of them left out."""
    if not path.exists():
        return {}
    older = json.loads(path.read_text())
    if not _is_of_here(older, data):
        raise SystemExit(
            f"{path} is of another machine or other versions: --only would mix them: measure all, or name a --folder"
        )
    return _parts(older)


def _is_of_here(older: dict, data: dict) -> bool:
    """Whether a file is of this machine with these versions."""
    return all(older.get(name) == data[name] for name in ("form", "device", "kind", "versions"))


def _parts(older: dict) -> dict[str, tuple[dict, list[dict]]]:
    return {
        part["name"]: (part, [each for each in older["not_run"] if each["what"].startswith(f"{part['name']}: ")])
        for part in older["parts"]
    }


def write(path: Path, data: dict) -> None:
    """Write the file at once or not at all: a line for every entry and every row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_suffix(".writing")
    beside.write_text(_lines(json.loads(json.dumps(data))) + "\n")
    beside.replace(path)


def _lines(value: object, depth: int = 4) -> str:
    """JSON with lists and objects opened up to a depth, and what is deeper on one line."""
    if not depth or not value or not isinstance(value, (dict, list)):
        return json.dumps(value)
    if isinstance(value, list):
        return "[\n" + ",\n".join(_lines(each, depth - 1) for each in value) + "\n]"
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {_lines(each, depth - 1)}" for key, each in value.items()) + "\n}"


def file_name(device: str, count: int = 1) -> str:
    """`nvidia-h200.json` for a device's name, `nvidia-h200-x4.json` for four of them."""
    return re.sub("[^A-Za-z0-9]+", "-", device).strip("-").lower() + (f"-x{count}" if count > 1 else "") + ".json"


def _ring_at(then: float | None) -> None:
    """Interrupt what runs at this time on the monotonic clock, and again and again until it stops (None: never)."""

    def ring(*_: object) -> None:
        raise Late(LATE)

    signal.signal(signal.SIGALRM, ring)
    wait = 0 if then is None else max(then - time.monotonic(), 0.001)
    signal.setitimer(signal.ITIMER_REAL, wait, _AGAIN_S if wait else 0)


def _end_helpers() -> None:
    """End processes that would keep this command's output, such as a fork server that imports torch."""
    for end, pid in ((os.kill, forkserver._forkserver._forkserver_pid), *((os.killpg, g) for g in gpu_tests.RUNNING)):
        with suppress(ProcessLookupError, TypeError):  # TypeError: there is no server
            end(pid, signal.SIGKILL)


@contextmanager
def _ended_at(end: float | None, write_rows: Callable[[], None]) -> Iterator[None]:
    """End what runs inside if it hasn't stopped at this time on the monotonic clock, with the rows that are there."""

    def now() -> None:
        print(f"FAILED: what runs doesn't stop, and is ended: {LATE}", flush=True)
        with suppress(Exception):
            write_rows()
        _end_helpers()
        os._exit(1)  # which ends the ranks, too

    timer = threading.Timer(0 if end is None else end - time.monotonic(), now)
    timer.daemon = True
    if end is not None:
        timer.start()
    try:
        yield
    finally:
        timer.cancel()


def main(arguments: list[str] | None = None) -> int:
    """Check, measure, write, and return the exit status."""
    started = gpu_needs.STARTED if arguments is None else time.monotonic()  # a deadline counts what imports take, too
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=tuple(SIZES), default="full")
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), default=(), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--folder", type=Path, help="where the file goes: results, or of a trial _build/results")
    parser.add_argument("--deadline", type=float, metavar="SECONDS", help="end by then, whatever runs")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not door.cuda.is_available():
        built = f"(torch {torch.__version__}, built for CUDA {torch.version.cuda})"
        why = usable_gpus("cuda")[1]
        said = f"make gpu needs a CUDA device, and torch finds none here {built}{why and ': '}{why}"
        print(*filter(None, (gpu_needs.show(PARTS), said)), sep="\n", file=sys.stderr)
        return 1
    size = SIZES[options.size]
    trial = options.device == "cpu" and options.size != "cores"
    if options.device == "cuda":
        num_devices = door.cuda.device_count()
    else:
        num_devices = max(size.ranks) if trial else gpu_box.cores()
    deadline = end = None
    if options.deadline:
        closing = min(_CLOSING_S, options.deadline / 10)
        deadline, end = (started + options.deadline - closing * part for part in (1, 0.3))
        _ring_at(deadline)
    if options.size == "full":
        size = for_machine(size, num_devices)
    setting = Setting(options.device, num_devices, size, deadline, end)
    name = "cpu trial" if trial else gpu_box.facts(options.device)["devices"][0]["name"]
    folder = options.folder or ROOT / ("_build/results" if trial else "results")
    path = folder / file_name(name, num_devices if options.device == "cuda" else 1)
    words = sys.argv[1:] if arguments is None else arguments
    try:
        data = measure(setting, path, " ".join(["python benchmarks/gpu.py", *words]), tuple(options.only))
    except Late:
        print("the deadline was there before anything was measured: give more seconds", file=sys.stderr)
        return 1
    finally:
        _ring_at(None)
    failed = [part["name"] for part in data["parts"] if part["state"] == "failed"]
    print(f"{len(data['not_run'])} things were not run, each listed there with its reason")
    print(f"== FAILED: {', '.join(failed)}" if failed else "== nothing failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
