"""The explorer's JavaScript against the package: the same rows, times, figures, reasons and errors."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator

import pytest

import pplab
from conftest import random_schedule
from javascript import HAS_QUICKJS, Evaluate, chromium_engine, opened
from pplab import Costs, Schedule, ScheduleError, Timeline, simulate, validate
from pplab.actions import parts
from pplab.builders import ALL, find
from pplab.deps import needs
from pplab.footprint import in_flight
from pplab.metrics import critical_path, num_messages
from pplab.timeline import idle_intervals

SEARCHED = ("ZB-1P", "ZB-2P")
OF_TODAY = {  # the page may lack a newer schedule, and says so, but none of these
    *("naive", "GPipe", "1F1B", "eager-1F1B", "Interleaved1F1B", "LoopedBFS", "ZB-H1", "ZB-H2", "ZB-1P", "ZB-2P"),
    *("InterleavedZeroBubble", "ZBVZeroBubble", "V-Half", "V-Min", "DualPipe", "DualPipeV"),
}
COUNT = 1000  # random configurations per schedule, and of the searched ones together


def expected(name: str, costs: dict, **options: object) -> dict:
    """What the package says of a configuration."""
    try:
        if "costs" in find(name).options:
            options["costs"] = Costs(**costs)
        return expected_of(pplab.build(name, **options), Costs(**costs))
    except ValueError as error:
        return {"error": str(error)}


def expected_of(schedule: Schedule, costs: Costs) -> dict:
    t = simulate(schedule, costs)
    numbers = (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches, schedule.copies)
    phases = {"fill": "fill", "inner": "wait", "drain": "drain"}
    return {
        "csv": schedule.to_csv(),
        "sizes": [*numbers, num_messages(schedule)],
        "placement": [place if isinstance(place, int) else list(place) for place in schedule.placement],
        "times": [[x for s in t.spans_of(r) for x in (s.start, s.end)] for r in range(schedule.num_ranks)],
        "figures": [t.makespan, t.bubble_fraction, t.bubble_ratio, t.span_bubble_fraction],
        "peaks": list(t.peak_in_flight),
        "busy": list(t.busy),
        "held": [[list(step) for step in zip(*curve, strict=True)] for curve in in_flight(t)],
        "path": [[s.rank, str(s.action), s.start] for s in critical_path(t)],
        "idle": [
            [i.rank, i.start, i.end, phases[i.phase], i.waits_for and str(i.waits_for), i.on_rank, i.until]
            for i in idle_intervals(t)
        ],
    }


def number(rng: random.Random) -> float:
    return rng.choice([rng.randint(0, 4), round(rng.uniform(0, 4), 1), rng.uniform(0, 4)])


def random_costs(rng: random.Random, num_stages: int) -> dict:
    """Durations as `Costs` takes them: of all stages or one per stage, never all of nothing."""
    each = lambda: number(rng) if rng.random() < 0.8 else [number(rng) for _ in range(num_stages)]  # noqa: E731
    costs = {"forward": rng.choice([1, 0.7, rng.uniform(0.1, 3)]), "backward_input": each(), "backward_weight": each()}
    costs["latency"] = rng.choice([0, 0.5, number(rng)])
    if rng.random() < 0.3:
        costs["backward"] = each()
    costs["overlap"] = rng.choice(["sum", "max", number(rng)])
    return costs


def random_configuration(rng: random.Random, name: str, most_ranks: int = 4, most_microbatches: int = 8) -> dict:
    """Names, sizes, options and costs. Some DualPipe's are refused."""
    P, M = rng.randint(1, most_ranks), rng.randint(1, most_microbatches)
    options: dict = {}
    if name.startswith("DualPipe"):
        P = rng.choice([1, 2, 2, 3, 4, *range(6, most_ranks + 1, 2)])
        M = max(1, 2 * P + rng.randint(-1, 5 if most_microbatches <= 8 else most_microbatches - 2 * P))
    if "nterleaved" in name or name == "LoopedBFS":
        options["stages_per_rank"] = rng.randint(1, 3)
    if "nterleaved" in name and rng.random() < 0.3:
        options["group_size"] = rng.randint(1, P + 2)
    if name == "GPipe":
        options["reverse_backward"] = rng.random() < 0.5
    if name == "1F1B" and rng.random() < 0.3:
        options["in_flight"] = [rng.randint(1, M) for _ in range(P)]
    two = any(b.name == name and b.placement == "V" for b in ALL)
    costs = random_costs(rng, P * options.get("stages_per_rank", 2 if two else 1))
    return {"name": name, "num_ranks": P, "num_microbatches": M, "costs": costs, **options}


def in_page(evaluate: Evaluate, name: str) -> None:
    """Skip a schedule that the registry has and the page hasn't."""
    if name not in OF_TODAY and not evaluate(f"pplab.schedules.some((s) => s.name === {json.dumps(name)})"):
        pytest.skip(f"{name} is not in the page yet: add its rows to core.js, as the other builders' are")


@pytest.mark.parametrize("name", [b.name for b in ALL if b.name not in SEARCHED])
def test_every_action_and_figure(evaluate: Evaluate, name: str) -> None:
    in_page(evaluate, name)
    rng = random.Random(name)
    agree(evaluate, [random_configuration(rng, name) for _ in range(COUNT)])


@pytest.mark.parametrize("name", [b.name for b in ALL if b.name not in SEARCHED])
def test_the_largest_that_the_page_must_handle(evaluate: Evaluate, name: str) -> None:
    """Up to 8 ranks and 32 microbatches, those two numbers included."""
    in_page(evaluate, name)
    rng = random.Random(f"{name}, larger")
    configurations = [random_configuration(rng, name, 8, 32) for _ in range(10)]
    largest = {"name": name, "num_ranks": 8, "num_microbatches": 32, "costs": {"backward_weight": 0.7, "latency": 0.3}}
    assert "error" not in expected(**largest)
    agree(evaluate, [*configurations, largest])


def agree(evaluate: Evaluate, configurations: list[dict], batch: int = 100) -> None:
    for first in range(0, len(configurations), batch):
        some = configurations[first : first + batch]
        for configuration, said in zip(some, evaluate(f"{json.dumps(some)}.map(report)"), strict=True):
            assert said == expected(**configuration), configuration


def test_every_searched_action_and_figure(evaluate: Evaluate) -> None:
    """The package searches once for both names: given a limit, they are one."""
    rng = random.Random(0)
    for first, second in (SEARCHED, SEARCHED[::-1]) * (COUNT // 20):
        some = [random_configuration(rng, first, 2, 4) | {"limit": rng.randint(1, 5)} for _ in range(5)]
        said = evaluate(f"{json.dumps(some)}.flatMap((one) => [report(one), report({{ ...one, name: '{second}' }})])")
        for configuration, one, other in zip(some, said[::2], said[1::2], strict=True):
            assert one == other == expected(**configuration), configuration


@pytest.mark.parametrize("name", SEARCHED)
def test_larger_searches(evaluate: Evaluate, name: str) -> None:
    rng = random.Random(name)
    configurations = [random_configuration(rng, name, 5, 9) for _ in range(10)]
    # A gap exactly as long as the weight gradient that fills it, which rarely decides the search.
    gap = {"num_ranks": 5, "num_microbatches": 7, "limit": 6, "costs": {"latency": 1}}
    configurations.append({"name": name, **gap})
    agree(evaluate, configurations)


def test_the_registry(evaluate: Evaluate) -> None:
    said = {schedule["name"]: schedule for schedule in evaluate("pplab.schedules")}
    assert OF_TODAY <= set(said) <= {b.name for b in ALL}
    known = [b for b in ALL if b.name in said]
    assert list(said) == [b.name for b in known]
    for b in known:
        of_python = {"name": b.name, "aliases": list(b.aliases), "rules": b.rules, "source": b.source}
        of_python |= {"placement": b.placement, "stagesPerRank": "stages_per_rank" in b.options}
        assert said[b.name] == of_python | {"searched": b.name in SEARCHED}
        for name in (b.name.upper(), *b.aliases):
            assert evaluate(f"pplab.build({json.dumps(name)}, {{ numRanks: 2, numMicrobatches: 4 }}).name") == b.name


def test_a_newer_schedule_is_said_to_be_missing(evaluate: Evaluate) -> None:
    said = evaluate('refused(() => pplab.build("newer", { numRanks: 2, numMicrobatches: 4 }))')
    assert said["message"].startswith("'newer' is not in the page yet: it knows naive, GPipe, 1F1B, ")


@pytest.mark.parametrize("name", sorted(OF_TODAY))
def test_sizes_that_no_schedule_takes(evaluate: Evaluate, name: str) -> None:
    for P, M in [(0, 4), (2, 0), (-1, 4), (1.5, 4), ("2", 4), (2, None), (True, 4)]:
        with pytest.raises(ValueError) as error:
            pplab.build(name, num_ranks=P, num_microbatches=M)
        sizes = json.dumps({"numRanks": P, "numMicrobatches": M})
        assert evaluate(f"refused(() => pplab.build({json.dumps(name)}, {sizes}))")["message"] == str(error.value)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Interleaved1F1B", {"stages_per_rank": 0}),
        ("LoopedBFS", {"stages_per_rank": 1.5}),
        ("InterleavedZeroBubble", {"group_size": 0}),
        ("InterleavedZeroBubble", {"group_size": 2}),
        ("1F1B", {"in_flight": [1, 2]}),
        ("1F1B", {"in_flight": [1, 2, 0]}),
        ("ZB-1P", {"limit": 0}),
        ("ZB-2P", {"limit": 2.5}),
    ],
)
def test_options_that_no_schedule_takes(evaluate: Evaluate, name: str, options: dict) -> None:
    configuration = {"name": name, "num_ranks": 3, "num_microbatches": 4, "costs": {}, **options}
    assert evaluate(f"report({json.dumps(configuration)})") == expected(**configuration)
    assert "error" in expected(**configuration)


@pytest.mark.parametrize(
    "costs",
    [
        *({name: wrong} for name in ("forward", "backward_input", "backward", "latency") for wrong in (-1, "1", True)),
        {"backward_weight": [1, -0.5]},
        {"overlap": "least"},
        {"overlap": -2},
        {"forward": [1, 2, 3]},
        {"backward": [1]},
    ],
)
def test_costs_that_are_refused(evaluate: Evaluate, costs: dict) -> None:
    with pytest.raises(ValueError) as error:
        simulate(pplab.build("GPipe", num_ranks=2, num_microbatches=2), Costs(**costs))
    simulated = 'pplab.simulate(pplab.build("GPipe", { numRanks: 2, numMicrobatches: 2 }), '
    said = evaluate(f"refused(() => {simulated} pplab.costs(camelled({json.dumps(costs)}))))")
    assert said["message"] == str(error.value)


def test_finer_costs(evaluate: Evaluate) -> None:
    rng = random.Random(0)
    for _ in range(50):
        costs, by = random_costs(rng, 3), rng.randint(1, 4)
        said = evaluate(f"pplab.costs(camelled({json.dumps(costs)})).finer({by})")
        finer = Costs(**costs).finer(by)
        for page, python in [("backwardInput", "backward_input"), ("backwardWeight", "backward_weight")]:
            said[python] = said.pop(page)
        as_list = lambda x: list(x) if isinstance(x, tuple) else x  # noqa: E731
        assert said == {name: as_list(getattr(finer, name)) for name in said}


def rows_of(schedule: Schedule) -> list[list[str]]:
    return [[str(item) for item in row] for row in schedule.rows]


def random_rows(rng: random.Random) -> list[list[str]]:
    """Of a schedule by hand: random placement and order, overlaps, one or two copies of the stages."""
    return rows_of(random_schedule(rng, overlap_share=rng.choice([0, 0.5]), bidirectional=rng.random() < 0.3))


def test_schedules_made_by_hand(evaluate: Evaluate) -> None:
    rng = random.Random(1)
    made = [random_rows(rng) for _ in range(COUNT)]
    costs = [random_costs(rng, Schedule(rows).num_stages) for rows in made]
    code = "pplab.schedule(rows, 'mine'), pplab.costs(camelled(costs))"
    said = evaluate(f"{json.dumps(list(zip(made, costs, strict=True)))}.map(([rows, costs]) => reportOf({code}))")
    for rows, given, each in zip(made, costs, said, strict=True):
        assert each == expected_of(Schedule(rows), Costs(**given)), rows


def broken(rng: random.Random, rows: list[list[str]]) -> list[list[str]]:
    """Rows with one or two things wrong, perhaps, as a person at a board leaves them."""
    rows = [list(row) for row in rows]
    for _ in range(rng.randint(1, 2)):
        row = rng.choice([row for row in rows if row] or [["0F0"]])
        at = rng.randrange(len(row))
        change = rng.randrange(7)
        if change == 0:
            rng.shuffle(row)
        elif change == 1:
            del row[at]
        elif change == 2:
            rng.choice(rows).insert(0, row[at])
        elif change == 3:
            rng.choice(rows).append(row.pop(at))
        elif change == 4 and "O" not in row[at]:
            kind = rng.choice(["F", "B", "I", "W", "SEND_F", "RECV_B"])
            row[at] = f"{rng.randint(0, 3)}{kind}{rng.randint(0, 3)}"
        elif change == 5:
            row.clear()
        else:
            other = rng.randrange(len(row))
            row[at], row[other] = row[other], row[at]
    return rows


def refusal(call: Callable[[], object]) -> dict | None:
    """What the package says of a fault, in the form of the page's `refused`."""
    try:
        call()
    except ScheduleError as error:
        action = error.action if error.action is None else str(error.action)
        return {"message": str(error), "rank": error.rank, "action": action, "isThere": True}
    except ValueError as error:
        return {"message": str(error), "rank": None, "action": None, "isThere": True}
    return None


def test_what_is_wrong_with_rows(evaluate: Evaluate) -> None:
    rng = random.Random(2)
    cases = []
    for _ in range(3 * COUNT):
        rows = random_rows(rng)
        if rng.random() < 0.9:
            rows = broken(rng, rows)
        cases.append((rows, rng.choice([None, None, 1, 2, 3])))
    check = "pplab.validate(pplab.schedule(rows), { maxInFlight })"
    said = evaluate(f"{json.dumps(cases)}.map(([rows, maxInFlight]) => refused(() => {check}, rows))")
    faults = set()
    for (rows, most), each in zip(cases, said, strict=True):
        wanted = refusal(lambda rows=rows, most=most: validate(Schedule(rows), max_in_flight=most))
        assert each == wanted, rows
        faults |= {fault for fault in FAULTS if wanted and fault in wanted["message"]}
    assert faults == set(FAULTS)  # every fault that the package knows came up


FAULTS = (
    *("is communication", "no rank runs stage", "has nothing to run", "lives on rank", "twice", "is on ranks"),
    *("on several ranks", "runs both", "is missing", "before", "deadlock", "memory limit", "at least one action"),
)


def test_csv(evaluate: Evaluate) -> None:
    rng = random.Random(3)
    texts = []
    for _ in range(COUNT):
        lines = [[noisy(rng, cell) for cell in row] for row in random_rows(rng)]
        texts.append(rng.choice(["\n", "\r\n"]).join(",".join(line) for line in lines) + rng.choice(["", "\n"]))
    texts += ["", ",,\n\n", "0F0,0B0\n\n1F0,1B0", "0F0,0SEND_F0,1UNSHARD,0B0\n", '"0F0","0B0"\n', ",0F0,,0B0,\n"]
    texts += ["0F0,0X0\n", "0F0,(0F1;0B1)OVERLAP_F_B\n", "0F0,(0F1;0W0)OVERLAP_F_B", "0F0,it's\n", "a,b'\"c\n", "0F,\n"]
    said = evaluate(
        f"{json.dumps(texts)}.map((text) => {{ let csv = null; const error = refused(() => "
        "{ csv = pplab.toCSV(pplab.parseCSV(text)); }); return { csv, error }; })"
    )
    for text, each in zip(texts, said, strict=True):
        error = refusal(lambda text=text: Schedule.from_csv(text))
        assert each == {"csv": None if error else Schedule.from_csv(text).to_csv(), "error": error}, text
    assert sum(each["error"] is not None for each in said) > 5


def noisy(rng: random.Random, cell: str) -> str:
    """A cell as other programs write it: blanks around it, quotes, empty cells and communication beside it."""
    form = rng.choice(["{}", "{}", "{}", " {} ", '"{}"', ",{}", "{},0SEND_F1", "3UNSHARD,{}"])
    return form.format(cell)


def test_what_a_span_waits_for(evaluate: Evaluate) -> None:
    rng = random.Random(4)
    for _ in range(40):
        rows, latency = random_rows(rng), rng.choice([0, 0.5])
        said = evaluate(f"waitsOf({json.dumps(rows)}, {latency})")
        waits = dict(waited_for(simulate(Schedule(rows), Costs(latency=latency)), latency))
        assert {text: {tuple(wait) for wait in each} for text, _, each in said} == waits
        for text, needed_by, _ in said:
            assert set(needed_by) == {user for user, made in waits.items() if text in {name for name, *_ in made}}
            assert len(needed_by) == len(set(needed_by))
        starts = {str(s.action): s.start for s in simulate(Schedule(rows), Costs(latency=latency)).spans}
        assert all(starts[text] == max((at for _, at, _ in each), default=0) for text, _, each in said)


def waited_for(timeline: Timeline, latency: float) -> Iterator[tuple[str, set]]:
    """Per item, what it needs: text, arrival, and how it gets there."""
    schedule = timeline.schedule
    spans = {action: span for span in timeline.spans for action in parts(span.action)}
    for rank in range(schedule.num_ranks):
        before = None
        for span in timeline.spans_of(rank):
            waits = {}
            for action in parts(span.action):
                for need in needs(action, schedule.num_stages):
                    made = next(
                        spans[a] for k in need.kinds if (a := action._replace(stage=need.stage, kind=k)) in spans
                    )
                    crosses = made.rank != rank
                    how = "kept" if need.stage == action.stage else "message" if crosses else "local"
                    waits.setdefault(str(made.action), (made.end + latency * crosses, how))
            if before:
                waits.setdefault(str(before.action), (before.end, "order"))
            waits.pop(str(span.action), None)
            yield str(span.action), {(text, *each) for text, each in waits.items()}
            before = span


@pytest.mark.parametrize("name", sorted(OF_TODAY))
def test_an_idle_interval_says_why(evaluate: Evaluate, name: str) -> None:
    said = evaluate(
        f"pplab.idle(pplab.simulate(pplab.build({json.dumps(name)}, {{ numRanks: 4, numMicrobatches: 8 }}), "
        "pplab.costs({ latency: 0.25 })))"
    )
    for idle in said:
        if idle["part"] == "drain":
            assert idle["text"] == f"rank {idle['rank']} has nothing left to do" and idle["for"] is None
        else:
            other, text = idle["for"], f"rank {idle['rank']} waits for {idle['waitsFor']}, which runs on rank "
            assert idle["waitsFor"] in other["item"]["text"] and other["end"] == idle["until"]
            assert idle["text"] == f"{text}{other['rank']} until {other['end']:g} and arrives at {idle['end']:g}"


@pytest.mark.skipif(not HAS_QUICKJS, reason="all other tests ran in a browser")
def test_a_browser_says_the_same() -> None:
    rng = random.Random(5)
    with opened(chromium_engine) as evaluate:
        agree(evaluate, [random_configuration(rng, b.name, 3, 5) for b in ALL if b.name in OF_TODAY for _ in range(3)])
