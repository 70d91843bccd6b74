"""Find out whether a machine is quiet enough to measure on: how much others take of its processors, and of its GPUs."""

from __future__ import annotations

import shutil
import subprocess
import sys
import time
from dataclasses import dataclass

import psutil

LIMIT = 0.1  # of the time of all cores: more than this by others shows in a chart
FLOOR_S = 0.3  # of one core's time: less than this is what a machine does by itself
GPU_LIMIT = 10  # percent of the time in which a GPU computes


class TooBusy(Exception):
    """Others took so much of the machine that a measurement would show it."""


@dataclass(frozen=True)
class Reading:
    """The clock, and the processor time until now, both everybody's and that of this process and all that it
    started."""

    at_s: float
    busy_s: float
    own_s: float

    @classmethod
    def now(cls) -> Reading:
        """Read them. On Linux, the time of children that ended is in their parents'."""
        here = psutil.Process()
        own = 0.0
        for process in (here, *here.children(recursive=True)):
            try:
                own += sum(process.cpu_times()[:4])  # user, system, and both of children that ended
            except psutil.NoSuchProcess:  # ended meanwhile: it's in its parent's time at the next reading
                continue
        times = psutil.cpu_times()._asdict()
        rest = ("idle", "iowait", "guest", "guest_nice")  # guests are in user's
        return cls(time.monotonic(), sum(s for name, s in times.items() if name not in rest), own)

    def check_since(self, start: Reading, when: str) -> None:
        """Raise TooBusy if others had more than LIMIT of the cores since `start`."""
        others_s = (self.busy_s - start.busy_s) - (self.own_s - start.own_s)
        share = others_s / (psutil.cpu_count() * (self.at_s - start.at_s))
        if share > LIMIT and others_s > FLOOR_S:
            raise TooBusy(
                f"{when} other processes took {others_s:.1f} s of processor time, {share:.0%} of all cores' "
                f"(at most {LIMIT:.0%}): end them and measure again"
            )


def check(seconds: float = 2) -> None:
    """Watch the machine while nothing is measured. Raises TooBusy."""
    start = Reading.now()
    time.sleep(seconds)
    Reading.now().check_since(start, "before anything ran,")
    if gpus := [percent for percent in gpu_use() if percent > GPU_LIMIT]:
        raise TooBusy(f"before anything ran, a GPU was {max(gpus)} % busy: end what computes on it and measure again")


def gpu_use() -> list[int]:
    """Each NVIDIA GPU's share of the last second in which it computed, in percent."""
    if not (command := shutil.which("nvidia-smi")):
        return []
    query = [command, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    printed = subprocess.run(query, text=True, capture_output=True).stdout
    return [int(line) for line in printed.split() if line.isdigit()]


def can_tell_own() -> bool:
    """Whether the time of processes that a notebook started and ended is known, so that a run can be watched."""
    return sys.platform == "linux"
