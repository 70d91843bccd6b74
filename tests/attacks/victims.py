"""What victims do. Each function here is the program of one; what it says is read by the harness."""

from __future__ import annotations

import ctypes
import gc
import itertools
import json
import os
import random
import re
import resource
import signal
import stat
import subprocess
import sys
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import hurts
import psutil
import torch
from harness import GONE_S, in_folder, lives, shared
from torch import nn

from pplab.lab import Save
from pplab.lab.checkpoints.checkpoint import collect, write
from pplab.runtime import Pool, RankError

ME = psutil.Process
TIMEOUT_S = 3.0  # of pools whose ranks stop moving
SLACK_S = 12.0  # that a busy machine takes on top
SWIFT_S = (
    15.0  # for what doesn't have to wait for that: it takes tenths of a second, on a machine that does nothing else
)


def say(word: str, **about: object) -> None:
    """Tell the harness."""
    with open("said", "a") as file:
        file.write(json.dumps({"word": word, **about}) + "\n")


class Hang(BaseException):
    """It took far too long."""


def alarm(*_: object) -> None:
    """A signal's handler."""
    raise Hang


# ---- ranks that fail, in a pool that lives


def things() -> dict[str, int]:
    """What this process has: a pool that has ended may leave none of it, but for what waits to be collected."""
    gc.collect()  # an error keeps a process that couldn't start, and its pipes, in a circle
    return {
        "processes": sum(lives(each) for each in ME().children(recursive=True)),
        "folders": len(shared([os.getpid()])),
        "temporary files": len(in_folder(Path(os.environ["TMPDIR"]))),
        "descriptors": ME().num_fds(),
        "threads": threading.active_count(),
        "ports": sum(each.status == "LISTEN" for each in ME().net_connections("inet")),
    }


def grown(base: dict[str, int], seconds: float = GONE_S, only: tuple[str, ...] = ()) -> list[str]:
    """What there is more of than before, so many seconds later."""
    until = time.monotonic() + seconds
    while True:
        now = {what: count for what, count in things().items() if what in (only or base)}
        found = [f"{count - base[what]} {what}" for what, count in now.items() if count > base[what]]
        if not found or time.monotonic() > until:
            return found
        time.sleep(0.02)


def ranks(rows: dict[str, int], seed: int, num_ranks: int) -> None:
    """Try every fault of some rows so many times, one after the other, and say what came of each."""
    draw = random.Random(seed)
    signal.signal(signal.SIGALRM, alarm)
    with Pool(num_ranks, device="cpu", timeout_s=60) as pool:
        pool.train(hurts.schedule(num_ranks), hurts.healthy(num_ranks), steps=1, check_gradients=True)
    for what, count in rows.items():
        kinds = list(itertools.product(FAULTS[what].hows, FAULTS[what].wheres))
        draw.shuffle(kinds)
        for how, where in itertools.islice(itertools.cycle(kinds), count):
            pool = Pool(num_ranks, device="cpu", timeout_s=TIMEOUT_S if FAULTS[what].stuck else 30)
            say("try", what=what, **_tried(pool, FAULTS[what], how, where, draw))
    say("done")


def _tried(pool: Pool, fault: Fault, how: str, where: str, draw: random.Random) -> dict:
    base = things()
    rank, within = draw.randrange(pool.num_ranks), TIMEOUT_S + SLACK_S if fault.stuck else SWIFT_S
    if where != "starting":
        pool.run(hurts.quick)
    struck = [time.monotonic()]
    signal.setitimer(signal.ITIMER_REAL, within + 5)
    seen, blamed = "nothing", False
    try:
        fault.act(pool, rank, how, where, draw, struck)
    except Hang:
        seen = "it hangs"
    except RankError as error:
        seen, blamed = error.cause.splitlines()[0], error.rank == rank and _names(where, error)
    except Exception as error:
        seen = f"{type(error).__name__}: {error}".splitlines()[0]
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
    seconds = time.monotonic() - struck[0]
    pool.close(grace_s=0)
    left = grown(base)
    try:
        run = pool.train(hurts.schedule(pool.num_ranks), hurts.healthy(pool.num_ranks), steps=1, check_gradients=True)
        left += [] if run.gradients.equal else ["a pool whose gradients are wrong"]
    except Exception as error:
        left += [f"a pool that can't start again: {error}"[:200]]
    pool.close()
    return {
        "how": f"rank {rank}: {how} {where}".strip(),
        "seen": seen,
        "ended": seen not in ("nothing", "it hangs") and seconds < within,
        "blamed": blamed,
        "left": left + grown(base),
        "seconds": seconds,
    }


def _names(where: str, error: RankError) -> bool:
    """Whether an error says where it happened."""
    if where in ("forward", "backward"):
        return error.action is not None and str(error.action.kind) == {"forward": "F", "backward": "B"}[where]
    words = {"optimizer": "optimizer", "loading": "load", "idle": "idle", "starting": "start|join|idle|work|build"}
    return re.search(words.get(where, ""), error.cause) is not None


class Fault(NamedTuple):
    """A row of the matrix: how a rank is hurt, in which ways and places."""

    act: Callable
    hows: list[str]
    wheres: list[str]
    stuck: bool = False  # the rank may stand still, until the pool's deadline


def _by_itself(pool: Pool, rank: int, how: str, where: str, draw: random.Random, struck: list[float]) -> None:
    workload, options = hurts.ailing(pool.num_ranks, rank, how, where)
    pool.train(hurts.schedule(pool.num_ranks), workload, steps=3, **options)


def _in_a_step(pool: Pool, rank: int, how: str, where: str, draw: random.Random, struck: list[float]) -> None:
    def strike() -> None:
        struck[0] = time.monotonic()
        with suppress(ProcessLookupError):
            os.kill(pid, getattr(signal, how))

    pid, timer = pool.pids[rank], threading.Timer(draw.uniform(0, 0.8), strike)
    timer.start()
    workload = hurts.healthy(pool.num_ranks, seconds=0.01)
    pool.train(hurts.schedule(pool.num_ranks), workload, steps=100)


def _idle(pool: Pool, rank: int, how: str, where: str, draw: random.Random, struck: list[float]) -> None:
    pool.run(hurts.soon, rank, how, 0.05)
    time.sleep(0.3)
    struck[0] = time.monotonic()
    pool.train(hurts.schedule(pool.num_ranks), hurts.healthy(pool.num_ranks), steps=1)


def _sent_much(pool: Pool, rank: int, how: str, where: str, draw: random.Random, struck: list[float]) -> None:
    pool.run(hurts.soon, rank, how, 0.05)
    time.sleep(0.3)
    struck[0] = time.monotonic()
    pool.train(hurts.schedule(pool.num_ranks), hurts.healthy(pool.num_ranks, width=1024), steps=1)


def _answering(pool: Pool, rank: int, how: str, where: str, draw: random.Random, struck: list[float]) -> None:
    pool.run(hurts.answer_in_part, rank, how)


def _starting(pool: Pool, rank: int, how: str, where: str, draw: random.Random, struck: list[float]) -> None:
    def strike() -> None:
        until = time.monotonic() + 10
        while len(found := _ranks_below()) <= rank and time.monotonic() < until:
            time.sleep(0.001)
        time.sleep(delay)
        struck[0] = time.monotonic()
        with suppress(ProcessLookupError, IndexError):
            os.kill(found[rank], getattr(signal, how))

    delay = draw.uniform(0, 0.02)
    threading.Thread(target=strike).start()
    pool.run(hurts.nap, 3.0)


def _ranks_below() -> list[int]:
    """The ranks' numbers, also while they start: what the fork server has forked, in that order."""
    from multiprocessing import forkserver

    server = forkserver._forkserver._forkserver_pid
    with suppress(psutil.NoSuchProcess):
        return sorted(each.pid for each in psutil.Process(server).children())
    return []


FATAL = [
    f"SIG{name}"
    for name in "KILL TERM SEGV ABRT BUS FPE ILL HUP QUIT ALRM USR1 USR2 SYS TRAP XCPU VTALRM PROF IO".split()
]
EVERYWHERE = ["forward", "backward", "optimizer", "loading"]
FAULTS = {
    "raises an exception": Fault(_by_itself, ["raise", "raise without words"], EVERYWHERE),
    "exits": Fault(_by_itself, ["exit", "raise SystemExit"], EVERYWHERE),
    "crashes in C": Fault(_by_itself, ["segfault", "abort"], EVERYWHERE),
    "is killed by a signal in a step": Fault(_in_a_step, FATAL, [""]),
    "is stopped in a step": Fault(_in_a_step, ["SIGSTOP"], [""]),
    "sleeps for ever": Fault(_by_itself, ["sleep"], EVERYWHERE, stuck=True),
    "spins for ever": Fault(_by_itself, ["spin"], EVERYWHERE, stuck=True),
    "holds the GIL in C for ever": Fault(_by_itself, ["hold the GIL"], EVERYWHERE, stuck=True),
    "is killed or stopped while idle": Fault(_idle, ["SIGKILL", "SIGSTOP", "SIGTERM"], ["idle"]),
    "is killed or stopped while it starts": Fault(_starting, ["SIGKILL", "SIGSTOP", "SIGTERM"], ["starting"]),
    "is killed, stopped or stuck while it answers": Fault(
        _answering, ["SIGSTOP", "SIGKILL", "hold the GIL", "sleep"], [""], stuck=True
    ),
    "is stopped or stuck while a large job is sent": Fault(
        _sent_much, ["SIGSTOP", "hold the GIL", "SIGKILL"], ["idle"], stuck=True
    ),
}


# ---- a pool whose process is killed


def owner(doing: str) -> None:
    """A program with a pool that is idle, busy, starting, saving or closing, or has a rank that won't listen."""
    pool = Pool(2, device="cpu", timeout_s=600)
    if doing == "starting":
        say("up", pids=[])
        pool.run(hurts.quick)
    pool.run(hurts.quick)
    say("up", pids=pool.pids)
    if doing == "idle":
        time.sleep(600)
    if doing == "closing":
        while True:
            pool.close()
            pool.run(hurts.quick)
    if doing == "saving":
        while True:
            save = Save("run.safetensors")
            pool.train(hurts.schedule(), hurts.healthy(width=256), save, steps=1)
    workload = hurts.healthy(seconds=0.01)
    if doing == "holding the GIL":
        workload, _ = hurts.ailing(2, 0, "hold the GIL", "forward")
    pool.train(hurts.schedule(), workload, steps=100_000)


def starts_a_pool() -> None:
    """A program that starts a pool, as the next one after a crash."""
    with Pool(2, device="cpu", timeout_s=30) as pool:
        say("up", answers=pool.run(hurts.quick))
    say("done")


# ---- interrupts


def interrupted(times: list[int], seed: int) -> None:
    """Interrupts at random moments of starting, training and closing, the exception kept as a notebook keeps it."""
    draw, kept = random.Random(seed), []
    with Pool(2, device="cpu") as pool:
        pool.train(hurts.schedule(), hurts.healthy(), steps=1)
    for number, count in enumerate(times):
        moment = ("starting", "training", "closing")[(number + number // len(set(times))) % 3]
        say("try", count=count, **_interrupted(moment, count, draw, kept))
    say("done")


def _interrupted(moment: str, count: int, draw: random.Random, kept: list) -> dict:
    base = things()
    pool = Pool(2, device="cpu", timeout_s=20)
    if moment != "starting":
        pool.run(hurts.quick)
    delay = draw.uniform(0.001, {"starting": 0.5, "training": 0.6, "closing": 0.1}[moment])
    more = [draw.choice([0.0005, 0.002, 0.01, 0.05]) for _ in range(count - 1)]
    first = []

    def hit(*_: object) -> None:
        first.append(time.monotonic())
        if more:
            signal.setitimer(signal.ITIMER_REAL, more.pop())
        raise KeyboardInterrupt

    signal.signal(signal.SIGALRM, hit)
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, delay)
            while True:
                pool.train(hurts.schedule(), hurts.healthy(seconds=0.01), steps=100 if moment != "closing" else 1)
                if moment == "closing":
                    pool.close()
        except BaseException as error:
            kept.append(error)
            while more:
                time.sleep(0.01)
            time.sleep(0.1)
    except KeyboardInterrupt as error:  # the second, while the first was handled
        kept.append(error)
    while more:
        with suppress(KeyboardInterrupt):
            time.sleep(0.01)
    with suppress(KeyboardInterrupt):
        time.sleep(0.1)
    if moment == "closing":
        pool.close()  # it may be up: nothing was interrupted but the way from one run to the next
    left = [] if pool.pids == () else ["a pool that says that it is up"]
    left += grown(base, only=("processes", "folders", "temporary files"))
    seconds, seen = time.monotonic() - first[0], type(kept[0]).__name__
    try:
        left += [] if pool.run(hurts.quick) == [0, 1] else ["a pool that answers wrong"]
    except Exception as error:
        left += [f"a pool that can't start again: {error}"[:200]]
    pool.close()
    kept.clear()
    gc.collect()
    left += grown(base)
    ended = seen == "KeyboardInterrupt" and seconds < SWIFT_S
    return {"how": f"{moment}, after {delay:.3f} s", "seen": seen, "ended": ended, "left": left, "seconds": seconds}


# ---- saving


def saver(path: str, size: int, first: int, count: int) -> None:
    """Saves so often, each checkpoint full of its number."""
    for step in range(first, first + count):
        write(path, [collect([full(size, step)], None, {})], step, "one")
        say("saved", step=step)


def full(size: int, number: float) -> nn.Module:
    """A module whose only weights are all this number."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.full((size,), float(number)))
    return module


# ---- growth


def grows(pools: int, runs: int) -> None:
    """Many pools, and many runs in one pool: what there is more of afterwards."""

    def once() -> None:
        with Pool(2, device="cpu", timeout_s=60) as pool:
            pool.train(hurts.schedule(), hurts.healthy(), steps=1)

    once()
    once()
    base, memory = things(), ME().memory_info().rss
    for _ in range(pools):
        started = time.monotonic()
        once()
        say("pool", seconds=time.monotonic() - started)
    say("pools", left=grown(base), megabytes=(ME().memory_info().rss - memory) / 1e6)
    with Pool(2, device="cpu", timeout_s=60) as pool:
        for number in range(runs):
            if number == 3:
                base, memory, open_before = things(), ME().memory_info().rss, pool.run(hurts.open_things)
            started = time.monotonic()
            pool.train(hurts.schedule(), hurts.healthy(), steps=3)
            say("run", seconds=time.monotonic() - started)
        now = pool.run(hurts.open_things)
        left = grown(base) + [
            f"{new[at] - old[at]} {what} of a rank"
            for old, new in zip(open_before, now, strict=True)
            for at, what in enumerate(("descriptors", "threads"))
            if new[at] > old[at]
        ]
        rank_mb = max(new[2] - old[2] for old, new in zip(open_before, now, strict=True)) * 4096 / 1e6
        say("runs", left=left, megabytes=max((ME().memory_info().rss - memory) / 1e6, rank_mb))
    say("done")


# ---- surroundings


def surrounded(*names: str) -> None:
    """Runs in surroundings that something is wrong with, one after the other; says what comes of each."""
    for name in names:
        base, started = None, time.monotonic()
        try:
            if len(names) > 1:  # what they do to the process passes
                run()
                base, started = things(), time.monotonic()
            outcome = SURROUNDINGS[name]()
        except Exception as error:
            outcome = f"{type(error).__name__}: {error}".splitlines()[0]
        seconds = time.monotonic() - started
        if base:
            run()  # whatever was refused, the next run isn't
        say("outcome", name=name, seen=outcome, seconds=seconds, left=grown(base) if base else [])
    say("done")


def run(**options: object) -> str:
    """A short run, checked."""
    with Pool(2, device="cpu", timeout_s=TIMEOUT_S * 3, **options) as pool:
        return right(pool)


def right(pool: Pool) -> str:
    """Whether a pool's run is right."""
    workload = hurts.healthy(pool.num_ranks, width=64)
    found = pool.train(hurts.schedule(pool.num_ranks), workload, steps=1, check_gradients=True)
    return "it runs" if found.gradients.equal else "wrong gradients"


def with_environment(**variables: str) -> str:
    """A run with these variables in the environment."""
    tempfile.tempdir = None  # it may have been asked for before
    os.environ.update(variables)
    return run()


def with_descriptors(most: int) -> str:
    """A run that may open so few files."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    return run()


def with_shared_memory(options: str) -> str:
    """A run whose /dev/shm is another one. Root's alone."""
    apart(CLONE_NEWNS)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", options, "none", "/dev/shm"], check=True)
    return run()


def without_shared_memory() -> str:
    """A run where there is no /dev/shm. Root's alone."""
    apart(CLONE_NEWNS)
    subprocess.run(["mount", "--make-rprivate", "/"], check=True)
    new = Path("dev").absolute()
    new.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", str(new)], check=True)
    for name in ("null", "zero", "random", "urandom"):
        number = os.stat(f"/dev/{name}").st_rdev
        os.mknod(new / name, 0o666 | stat.S_IFCHR, number)
    subprocess.run(["mount", "--bind", str(new), "/dev"], check=True)
    return run()


def without_loopback() -> str:
    """A run where not even a machine's own address answers. Root's alone."""
    apart(CLONE_NEWNET)
    return run()


CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000


def apart(flags: int) -> None:
    """Give this process mounts or a network of its own."""
    if ctypes.CDLL(None, use_errno=True).unshare(flags):
        raise OSError(ctypes.get_errno(), "can't unshare")


def after(who: str, number: int) -> str:
    """A run after something was done, between two runs, to a process that serves all pools."""
    from multiprocessing import forkserver, resource_tracker

    with Pool(2, device="cpu", timeout_s=TIMEOUT_S * 3) as pool:
        pool.run(hurts.quick)
    server, tracker = forkserver._forkserver._forkserver_pid, resource_tracker._resource_tracker._pid
    os.kill({"server": server, "tracker": tracker}[who], number)
    time.sleep(0.3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # multiprocessing says that its tracker died
        return run()


def two_threads() -> str:
    """Two threads train with one pool at the same time: right, or refused."""
    found = []
    with Pool(2, device="cpu", timeout_s=30) as pool:

        def train() -> None:
            try:
                found.append(right(pool))
            except RankError as error:
                found.append(f"a thread's run failed: {error.cause}")
            except Exception as error:
                found.append(f"{type(error).__name__}: {error}")

        threads = [threading.Thread(target=train) for _ in range(3)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    return next((each for each in found if each != "it runs"), "it runs")


def forks() -> str:
    """A program that forks, and whose child ends as programs do, while the pool is up."""
    pool = Pool(2, device="cpu", timeout_s=TIMEOUT_S * 3)
    pool.run(hurts.quick)
    if (child := os.fork()) == 0:
        sys.exit(0)
    _, ended = os.waitpid(child, 0)
    found = right(pool) if not ended else f"a child that ends with {ended}"
    pool.close()
    return found


def dropped() -> str:
    """A pool that is never closed, but forgotten."""
    pool = Pool(2, device="cpu", timeout_s=30)
    pids = pool.run(hurts.quick) and pool.pids
    del pool
    gc.collect()
    until = time.monotonic() + GONE_S
    while any(psutil.pid_exists(pid) for pid in pids) and time.monotonic() < until:
        time.sleep(0.02)
    return "ranks that stay" if any(psutil.pid_exists(pid) for pid in pids) else "it runs"


NOWHERE = "http://127.0.0.1:9"
SURROUNDINGS = {
    "few descriptors": partial(with_descriptors, 24),
    "64 descriptors": partial(with_descriptors, 64),
    "a tiny /dev/shm": partial(with_shared_memory, "size=16k"),
    "a read-only /dev/shm": partial(with_shared_memory, "ro"),
    "no /dev/shm": without_shared_memory,
    "no loopback": without_loopback,
    "proxies, a TMPDIR and torchrun's variables that lead nowhere": partial(
        with_environment, https_proxy=NOWHERE, ALL_PROXY=NOWHERE, TMPDIR="/no/where", MASTER_ADDR="no.where", RANK="5"
    ),
    "a network interface that isn't there": partial(with_environment, GLOO_SOCKET_IFNAME="nope0"),
    "a fork server that was killed": partial(after, "server", signal.SIGKILL),
    "a fork server that is stopped": partial(after, "server", signal.SIGSTOP),
    "a resource tracker that was killed": partial(after, "tracker", signal.SIGKILL),
    "three threads with one pool": two_threads,
    "a child that the program forks": forks,
    "a pool that is forgotten": dropped,
}
