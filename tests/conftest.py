"""What the tests share: random legal schedules, a simulator that owes nothing to pplab's, and a machine.

Some processes run the tests, file by file. Each has a folder for temporary files to itself. Tests that are marked
`timed` run beside others. One that fails is tried again, and then the other processes wait.
"""

from __future__ import annotations

import fcntl
import functools
import gc
import gzip
import heapq
import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from math import inf
from pathlib import Path
from typing import IO

import pytest
import quiet
from kernel_ports import OwnPorts

import pplab.lab  # noqa: F401 (its schedules are tested with the others)
from javascript import evaluate  # noqa: F401 (a fixture)
from pplab import Action, Costs, Kind, Link, Overlap, Schedule, builders

F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W  # noqa: E741
gc.disable()  # until all is collected

ROOT = Path(__file__).parents[1]
WITHOUT_TORCH = ROOT / "tests" / "without_torch"  # a Python that finds it has what `make book` needs, and no more
sys.path.append(str(ROOT / "benchmarks"))  # what tests import from there


BUILDS = "test_book.py"  # the first file of those that want the book
SHARED = pytest.StashKey[str]()  # the folder that the processes of this run share


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node) -> None:
    """Make a folder for what a process that runs tests leaves while it lives, where tests look what is left; and one
    for what all processes know."""

    node.workerinput.update(temporary=_folder(node.config), shared=node.config.stash[SHARED])


def _folder(config: pytest.Config) -> str:
    made = tempfile.mkdtemp(prefix="tests-")
    config.add_cleanup(lambda: shutil.rmtree(made, ignore_errors=True))
    return made


def pytest_configure(config: pytest.Config) -> None:
    """Take that folder, and ports for notebooks' kernels.

    Threads that wait for each other sleep: a spinning one keeps the core that the other needs.
    And a shell that starts the tests in the background has them ignore the interrupts that some of them are about.
    """
    OwnPorts.instance()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # notebooks' kernels and ranks inherit it
    if hasattr(config, "workerinput"):
        os.environ["TMPDIR"] = tempfile.tempdir = config.workerinput["temporary"]
        config.stash[SHARED] = config.workerinput["shared"]
    else:
        config.stash[SHARED] = _folder(config)  # where there are no workers, this process runs the tests


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Notebooks, which sleep for much of their time to keep a pace, lie evenly between the others, the last chapters
    first: they take longest, and what is long mustn't be left at the end, where no notebook is. Other files come by
    their own names, not their folders', so that what computes a lot, or waits a lot, doesn't lie together. What builds
    the book goes before all: until there is one, whoever wants it waits.
    """
    files = sorted({item.path for item in items}, key=lambda path: (path.name != BUILDS, path.name, path))
    notebooks, others = ([path for path in files if (path.suffix == ".ipynb") is is_one] for is_one in (True, False))
    place = {path: i / len(others) for i, path in enumerate(others, 1)}
    place |= {path: 0.9 * i / len(notebooks) for i, path in enumerate(notebooks[::-1], 1)}
    for cell in (item.cell for item in items if item.path.suffix == ".ipynb"):
        cell["outputs"] = without_folds(cell["outputs"])
    items.sort(key=lambda item: (place[item.path], item.path))


def without_folds(outputs: list) -> list:
    """The outputs that a cell makes: not what `tools/execute_notebooks.py` puts before the answer of a guess."""
    return [output for output in outputs if output.get("metadata", {}) != {"pplab": "folded"}]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log):
    """Hand tests out by files."""
    from xdist.scheduler import LoadFileScheduling

    class ByFiles(LoadFileScheduling):
        def remove_node(self, node) -> str | None:
            """Forget what a process had done when it ended: xdist hands its files out again, and waits for tests of
            theirs for ever if none is left."""
            work = self.assigned_work[node]
            self.assigned_work[node] = {scope: tests for scope, tests in work.items() if not all(tests.values())}
            return super().remove_node(node)

    return ByFiles(config, log)


def pytest_collection_finish() -> None:
    """What has been imported, torch among it, stays for good: looking through it for garbage is lost time."""
    gc.freeze()
    gc.set_threshold(100_000, 20, 20)  # what tests make is soon gone: garbage among it is looked for seldom
    gc.enable()


@pytest.hookimpl(trylast=True)
def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say last how many tests were skipped, and why: where something is missing, the reason says how to install it."""
    skipped = Counter(report.longrepr[2].removeprefix("Skipped: ") for report in terminalreporter.getreports("skipped"))
    for reason, number in skipped.most_common():
        terminalreporter.write_line(f"{number} skipped: {reason}")


ROOM = pytest.StashKey[IO | None]()  # this process's place among those that run a test


@contextmanager
def another_processor(item: pytest.Item) -> Iterator[None]:
    """Execute a notebook, and its ranks, without the vector instructions with which it was recorded. Sums round
    differently there, as they do on other people's processors. So an output with too many digits of them isn't equal.
    """
    with pytest.MonkeyPatch.context() as patch:
        if item.path.suffix == ".ipynb" and "ATEN_CPU_CAPABILITY" not in os.environ:
            patch.setenv("ATEN_CPU_CAPABILITY", "default")  # torch's name for it; a kernel inherits it when it starts
        yield


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    """Run a test with all its fixtures, beside others."""
    with another_processor(item), beside_others(item.config):
        return (yield)


@contextmanager
def beside_others(config: pytest.Config) -> Iterator[None]:
    """Be one of those that run a test, until one of them wants to be alone."""
    with ExitStack() as held:
        with locked(config, "door"):  # behind which others wait for one that waits to be alone
            config.stash[ROOM] = held.enter_context(locked(config, "room", fcntl.LOCK_SH))
        yield


def be_alone(config: pytest.Config) -> None:
    """Wait until the other processes have ended their tests. They begin no other before this one has ended."""
    room = config.stash[ROOM]
    if room is not None:
        fcntl.flock(room, fcntl.LOCK_UN)  # or two that want to be alone would wait for each other
        with locked(config, "door"):
            fcntl.flock(room, fcntl.LOCK_EX)
        config.stash[ROOM] = None  # whoever stands in the door now waits for this test


TRIES = 3  # of a test that measures times
PATIENCE_S = 10  # for a quiet moment, before each further try


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Try a test that measures times again, alone: a machine's busy moment passes, and what is wrong is wrong each
    time."""
    timed = pyfuncitem.get_closest_marker("timed")
    given = {name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}
    for _ in range(TRIES - 1 if timed else 0):
        with suppress(AssertionError):
            pyfuncitem.obj(**given)
            return True
        be_alone(pyfuncitem.config)
        until = time.monotonic() + PATIENCE_S
        while time.monotonic() < until:
            with suppress(quiet.TooBusy):
                quiet.check(1)
                break
    return None  # the last try is pytest's own


@contextmanager
def locked(config: pytest.Config, name: str, how: int = fcntl.LOCK_EX) -> Iterator[IO]:
    """Hold a lock that the processes of this run share; it goes with the process that holds it."""
    with open(Path(config.stash[SHARED], name), "w") as file:
        fcntl.flock(file, how)
        yield file


def random_schedule(
    rng: random.Random,
    num_ranks: int | None = None,
    split_share: float = 0.5,
    overlap_share: float = 0,
    bidirectional: bool = False,
) -> Schedule:
    """A legal schedule: random ranks, stages, placement, microbatches, full and split backwards, overlaps, and order.

    Grown by running it: at every step a random rank appends a random action whose needs are met, or two at once.
    """
    num_ranks = num_ranks or rng.randint(1, 5)
    num_stages = num_ranks + rng.randint(0, 4)
    num_microbatches = rng.randint(1, 6)
    places = [*range(num_ranks), *(rng.randrange(num_ranks) for _ in range(num_stages - num_ranks))]
    rng.shuffle(places)
    if bidirectional:
        num_ranks = num_stages = 2 * rng.randint(1, 3)
        num_microbatches = max(num_microbatches, 2)
        places = list(range(num_ranks))

    def home(stage: int, m: int) -> int:
        return num_ranks - 1 - places[stage] if bidirectional and m % 2 else places[stage]

    split = {(s, m): rng.random() < split_share for s in range(num_stages) for m in range(num_microbatches)}
    todo = {(s, k, m) for (s, m), two in split.items() for k in ("FIW" if two else "FB")}
    done: set[tuple[int, str, int]] = set()
    rows: list[list[str]] = [[] for _ in range(num_ranks)]
    while todo:
        ready = sorted(a for a in todo if is_ready(a, done, num_stages))
        chosen = [rng.choice(ready)]
        stage, kind, m = chosen[0]
        rank = home(stage, m)
        if rng.random() < overlap_share:
            others = [a for a in ready if a[::2] != (stage, m) and home(a[0], a[2]) == rank]
            chosen += rng.sample(others, min(1, len(others)))
        names = [f"{stage}{kind}{m}" for stage, kind, m in chosen]
        pair = f"({';'.join(names)})OVERLAP_{'_'.join(kind for _, kind, _ in chosen)}"
        rows[rank].append(names[0] if len(names) == 1 else pair)
        todo -= set(chosen)
        done |= set(chosen)
    return Schedule(rows)


def is_ready(action: tuple[int, str, int], done: set, num_stages: int) -> bool:
    """The dependencies, written down a second time."""
    stage, kind, m = action
    if kind == "F":
        return stage == 0 or (stage - 1, "F", m) in done
    if kind == "W":
        return (stage, "I", m) in done
    after = stage == num_stages - 1 or (stage + 1, "B", m) in done or (stage + 1, "I", m) in done
    return (stage, "F", m) in done and after


def slow_simulate(schedule: Schedule, costs: Costs) -> dict[Action | Overlap, tuple[float, float]]:
    """Start and end of every item: a simulation of events in the order of time. Links are servers with queues."""
    last = schedule.num_stages - 1
    home = {
        (a.stage, a.microbatch): rank for rank, row in enumerate(schedule.rows) for item in row for a in halves(item)
    }
    there: set[tuple[int, str, int]] = set()  # what has arrived: (stage, "x" its input or "g" its output's gradient, m)
    queues: dict[tuple[int, int], list] = {}
    busy_links: set[tuple[int, int]] = set()
    position, running = [0] * schedule.num_ranks, [False] * schedule.num_ranks
    times: dict = {}
    events: list[tuple[float, int, str, object]] = []
    counter = itertools.count()

    def at(time: float, what: str, about: object) -> None:
        heapq.heappush(events, (time, next(counter), what, about))

    def duration(item) -> float:
        total = []
        for stage, kind, m in halves(item):
            per = lambda name: at_place(getattr(costs, name), stage, m)  # noqa: B023, E731
            if kind == F:
                total.append(per("forward"))
            elif kind == W:
                total.append(per("backward_weight"))
            elif kind == B and costs.backward is not None:
                total.append(per("backward") + per("recompute"))
            else:
                weights = per("backward_weight") if kind == B else 0
                total.append(per("backward_input") + weights + per("recompute"))
        return work(item, total) + max(at_place(costs.overhead, stage) for stage, _, _ in halves(item))

    def work(item, total: list[float]) -> float:
        if len(total) == 1:
            return total[0]
        if costs.overlap in ("sum", "max"):
            return sum(total) if costs.overlap == "sum" else max(total)
        said = costs.overlap if isinstance(costs.overlap, dict) else {("F", "B"): costs.overlap}
        a, b = ((f"{stage}{kind}", str(kind), stage) for stage, kind, _ in halves(item))
        both_orders = [key for x, y in ((a, b), (b, a)) for key in zip(x, y, strict=True)]
        of_stages = [(x[2], y[2]) for x, y in ((a, b), (b, a)) if (x[1], y[1]) == ("F", "B")]
        found = [said.get(key) for key in [*both_orders[0::3], *of_stages, *both_orders[1::3]]]
        return next((each for each in found if each is not None), sum(total))

    def is_there(stage: int, kind: str, m: int) -> bool:
        own = lambda k: any((stage, k, m) in set(map(tuple, halves(item))) for item in times)  # noqa: E731
        if kind == F:
            return stage == 0 or (stage, "x", m) in there
        return kind == W or (own("F") if stage == last else (stage, "g", m) in there)

    def send(now: float, source: int, what: tuple[int, str, int], size: float) -> None:
        target = home[what[0], what[2]]
        if target == source:
            at(now, "arrives", what)
            return
        queues.setdefault((source, target), []).append((what, size))
        serve(now, (source, target))

    def serve(now: float, pair: tuple[int, int]) -> None:
        if pair in busy_links or not queues.get(pair):
            return
        what, size = queues[pair].pop(0)
        link = costs.links.get(pair, Link(costs.latency, costs.bandwidth))
        busy_links.add(pair)
        at(now + size / link.bandwidth, "passed", (pair, what, link.latency))

    for rank in range(schedule.num_ranks):
        at(0, "look", rank)
    while events:
        now, _, what, about = heapq.heappop(events)
        if what == "passed":
            pair, message, latency = about
            busy_links.discard(pair)
            serve(now, pair)
            at(now + latency, "arrives", message)
        elif what == "arrives":
            there.add(about)
        elif what == "ends":
            rank, item = about
            running[rank] = False
            for stage, kind, m in halves(item):
                size = lambda s: at_place(costs.message, s, m)  # noqa: B023, E731
                if kind == F and stage < last:
                    send(now, rank, (stage + 1, "x", m), size(stage))
                elif kind in (B, I) and stage > 0:
                    send(now, rank, (stage - 1, "g", m), size(stage - 1))
        for rank, row in enumerate(schedule.rows):
            if running[rank] or position[rank] == len(row):
                continue
            item = row[position[rank]]
            if all(is_there(*half) for half in halves(item)):
                times[item] = (now, now + duration(item))
                position[rank], running[rank] = position[rank] + 1, True
                at(times[item][1], "ends", (rank, item))
    return times


def at_place(value: object, *place: int) -> float:
    """A number, whether lists go down to stages, to their microbatches, or nowhere."""
    while isinstance(value, tuple):
        value, *place = value[place[0]], *place[1:]
    return value


def halves(item: Action | Overlap) -> tuple[Action, ...]:
    return (item,) if isinstance(item, Action) else tuple(item)


def in_turn(schedule: Schedule) -> Schedule:
    """The schedule with the halves of its overlaps one after the other, as a model without a function for them runs."""
    return Schedule([[half for item in row for half in halves(item)] for row in schedule.rows])


@pytest.fixture(params=range(8))
def rng(request) -> random.Random:
    """A seeded source of randomness; every test that takes it runs with several seeds."""
    return random.Random(request.param)


def assert_explained(check, answer: object, says: str) -> None:
    """An exercise's checker refuses the answer, in these words among others."""
    verdict = check(answer)
    assert verdict.right is False and not verdict, verdict
    assert says in verdict.says, verdict


KINDS = {"1F1B", "ZB-H1", "Interleaved1F1B", "ZBVZeroBubble", "DualPipeV", "DualPipe"}


def names_of_schedules() -> list:
    """All schedules' names, for what is added to a run: those of other than these kinds are for `make attack`.

    They are whole and split backwards, one stage on a rank, two in a loop and on a V, pairs, and weights in two places.
    That every schedule runs, whatever its order, tests/running/test_runtime.py shows at every commit.
    """
    return [pytest.param(each.name, marks=[pytest.mark.long] * (each.name not in KINDS)) for each in builders.known()]


def built(builder, P: int, M: int, **options) -> Schedule | None:
    """The schedule, or None where the builder refuses these numbers, saying which and what it takes."""
    try:
        return builder(P, M, **options)
    except ValueError as error:
        assert builder.name in str(error) and "got" in str(error), error
        return None


def traced(path: str | Path, name: str) -> list[float]:
    """How long each span lasts, in ms, whose name begins so in a trace of `lab.Profile`."""
    events = json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]
    return [each["dur"] / 1e3 for each in events if each.get("ph") == "X" and each["name"].startswith(name)]


@functools.cache
def registry(num_ranks: int, num_microbatches: int) -> tuple[Schedule, ...]:
    """Every schedule that can have these sizes, built once: two of them are found by a search."""
    return tuple(filter(None, (built(builder, num_ranks, num_microbatches) for builder in builders.known())))


def random_costs(
    rng: random.Random, num_stages: int, num_ranks: int, queues: bool = True, num_microbatches: int | None = None
) -> Costs:
    """Whole numbers, so that two ways to add them agree; given how many microbatches, some of each its own."""

    def per_stage(most: int = 9, differ: bool = True) -> list:
        of_each = [num_microbatches if differ and rng.random() < 0.5 else None for _ in range(num_stages)]
        return [[rng.randint(0, most) for _ in range(n)] if n else rng.randint(0, most) for n in of_each]

    pairs = [(a, b) for a in range(num_ranks) for b in range(num_ranks) if a != b]
    bandwidth = lambda: rng.choice([inf, 1, 0.5, 0.25]) if queues else inf  # noqa: E731
    return Costs(
        per_stage(),
        per_stage(),
        per_stage(),
        latency=rng.choice([0, 2]),
        backward=rng.choice([None, None, per_stage()]),
        recompute=rng.choice([0, per_stage(3)]),
        overhead=rng.choice([0, 2, per_stage(3, differ=False)]),
        overlap=rng.choice(["sum", "max", 7, {(0, 1): 5, ("0F", "1I"): 3, ("I", "F"): 4, (W, I): 2, ("B", "W"): 6}]),
        bandwidth=bandwidth(),
        message=per_stage(4),
        links={pair: Link(rng.randint(0, 5), bandwidth()) for pair in rng.sample(pairs, min(2, len(pairs)))},
    )


@pytest.fixture(scope="module")
def pools() -> Iterator[Callable]:
    """Pools by number of ranks, up for the whole module."""
    from pplab.runtime import Pool

    made: dict[int, Pool] = {}

    def pool(num_ranks: int) -> Pool:
        if num_ranks not in made:
            made[num_ranks] = Pool(num_ranks, device="cpu", timeout_s=60)
        return made[num_ranks]

    yield pool
    for each in made.values():
        each.close()


@pytest.fixture(scope="module")
def pool(pools: Callable) -> object:
    """One of two ranks."""
    return pools(2)


@pytest.fixture(scope="session")
def book(pytestconfig: pytest.Config) -> Path:
    """The folder of the book's pages, built once for all tests that look at them, whichever process runs them."""
    html = ROOT / "_build" / "html"
    run = os.environ.get("PYTEST_XDIST_TESTRUNUID", "")
    built_by = html.parent / "built_by"
    with locked(pytestconfig, "book"):
        if not run or not built_by.is_file() or built_by.read_text() != run:
            path = os.pathsep.join([str(WITHOUT_TORCH), os.environ.get("PYTHONPATH", "")]).strip(os.pathsep)
            command, nowhere = [sys.executable, "tools/build_book.py"], {"PPLAB_REPOSITORY": "", "PYTHONPATH": path}
            done = subprocess.run(command, cwd=ROOT, env=os.environ | nowhere, text=True, capture_output=True)
            assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
            assert "NO ADDRESS OF THE BOOK'S SOURCE IS SET" in done.stderr.splitlines()[-1]
            assert f"open {(html / 'index.html').as_uri()}" in done.stdout
            built_by.write_text(run)
    return html


def on_fake_gpus(arguments: list[str], gpus: int, **environment: str) -> subprocess.CompletedProcess:
    """Run Python where tests/fake_gpus plays so many GPUs."""
    path = os.pathsep.join(
        [str(ROOT / "tests" / "fake_gpus"), str(ROOT / "src"), str(ROOT / "tests"), str(ROOT / "benchmarks")]
    )
    asked = {**os.environ, "FAKE_GPUS": str(gpus), "PYTHONPATH": path, **environment}
    return subprocess.run(
        [sys.executable, *arguments], cwd=ROOT, env=asked, text=True, capture_output=True, timeout=300
    )
