"""`make gpu`: check a machine with CUDA devices, measure on it, and write results/<device>.json.

    python benchmarks/gpu.py [--device cuda|cpu] [--size full|small] [--only PART ...] [--folder FOLDER]

Every part's results are written as soon as they are there, so a later part that fails loses nothing. Whatever is not
run is printed with its reason and listed in the file. The exit status is 1 when anything failed. `--device cpu` tries
the command itself: it measures nothing about a GPU, and its file says so.
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import sys
import time
import traceback
from pathlib import Path

import gpu_box
import torch
from gpu_parts import PARTS
from gpu_setting import ROOT, SIZES, Part, Setting

from pplab import results


def measure(setting: Setting, path: Path, command: str, only: tuple[str, ...] = ()) -> dict:
    """Run the parts and write the file after each; returns what the file holds."""
    box = gpu_box.facts(setting.device)
    print(gpu_box.show(box), flush=True)
    data = {
        "form": results.FORM,
        "device": box["devices"][0]["name"],
        "kind": setting.device,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command,
        "versions": box["versions"],
        "box": box,
        "not_run": [],
        "parts": [],
    }
    for name, run in PARTS.items():
        part = Part(name, data["not_run"])
        started = time.monotonic()
        if only and name not in only:
            part.leave_out("all of it", f"only {', '.join(only)} was asked for")
        else:
            print(f"== {name}: {run.__doc__.splitlines()[0]}", flush=True)
            try:
                run(setting, part)
            except Exception as error:  # a part that fails loses neither its own rows nor the other parts'
                part.errors.append("".join(traceback.format_exception(error))[-4000:])
                print(f"FAILED: {name}: {error}", flush=True)
        data["parts"].append(part.to_dict(time.monotonic() - started))
        write(path, data)
    return data


def write(path: Path, data: dict) -> None:
    """Write the file at once or not at all: a line for every entry and every row."""
    plain = json.loads(json.dumps(data))
    if wrong := results.problems(plain):
        raise AssertionError(f"what was measured is no recording: {wrong}")
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    unfinished.write_text(_lines(plain) + "\n")
    unfinished.replace(path)


def _lines(value: object, depth: int = 4) -> str:
    """JSON with lists and objects opened up to a depth, and what is deeper on one line."""
    if not depth or not value or not isinstance(value, (dict, list)):
        return json.dumps(value)
    if isinstance(value, list):
        return "[\n" + ",\n".join(_lines(each, depth - 1) for each in value) + "\n]"
    return "{\n" + ",\n".join(f"{json.dumps(key)}: {_lines(each, depth - 1)}" for key, each in value.items()) + "\n}"


def file_name(device: str) -> str:
    """`nvidia-h200.json` for a device's name."""
    return re.sub("[^A-Za-z0-9]+", "-", device).strip("-").lower() + ".json"


def main(arguments: list[str] | None = None) -> int:
    """Check, measure, write; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=tuple(SIZES), default="full")
    parser.add_argument("--only", nargs="+", choices=tuple(PARTS), default=(), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--folder", type=Path, help="where the file goes: results, or of a trial _build/results")
    options = parser.parse_args(arguments)
    if options.device == "cuda" and not torch.cuda.is_available():
        print(
            "make gpu needs a CUDA device, and torch finds none here "
            f"(torch {torch.__version__}, built for CUDA {torch.version.cuda})",
            file=sys.stderr,
        )
        return 1
    num_devices = torch.cuda.device_count() if options.device == "cuda" else max(SIZES[options.size].ranks)
    setting = Setting(options.device, num_devices, SIZES[options.size])
    name = torch.cuda.get_device_name(0) if options.device == "cuda" else "cpu trial"
    folder = options.folder or ROOT / ("results" if options.device == "cuda" else "_build/results")
    path = folder / file_name(name)
    words = sys.argv[1:] if arguments is None else arguments
    data = measure(setting, path, " ".join(["python benchmarks/gpu.py", *words]), tuple(options.only))
    failed = [part["name"] for part in data["parts"] if part["state"] == "failed"]
    print(
        f"== wrote {path}", f"{len(data['not_run'])} things were not run, each listed there with its reason", sep="\n"
    )
    print(f"== FAILED: {', '.join(failed)}" if failed else "== nothing failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
