"""The explorer's JavaScript against the package: the same rows, times, figures and reasons, and the same refusals."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from itertools import product

import pytest

import pplab
from conftest import random_schedule
from javascript import HAS_QUICKJS, Evaluate, chromium_engine, opened
from pplab import Costs, Schedule, Timeline, lab, simulate
from pplab.actions import parts
from pplab.builders import ALL, find, register
from pplab.course.notebook import explored
from pplab.deps import needs
from pplab.lab import num_messages
from pplab.panels import critical_path
from pplab.timeline import idle_intervals

NAMES = [b.name for b in ALL]


def expected(name: str, costs: dict, **options: object) -> dict:
    """What the package says of a configuration."""
    try:
        its_costs = {"costs": Costs(**costs)} if "costs" in find(name).options else {}
        return expected_of(simulate(pplab.build(name, **options, **its_costs), Costs(**costs)))
    except ValueError as error:
        return {"error": str(error)}


def expected_of(t: Timeline) -> dict:
    schedule = t.schedule
    numbers = (schedule.num_ranks, schedule.num_stages, schedule.num_microbatches, schedule.copies)
    phases = {"fill": "fill", "inner": "wait", "drain": "drain"}
    return {
        "csv": lab.to_csv(schedule),
        "sizes": [*numbers, num_messages(schedule)],
        "placement": [place if isinstance(place, int) else list(place) for place in schedule.placement],
        "times": [[x for s in t.spans_of(r) for x in (s.start, s.end)] for r in range(schedule.num_ranks)],
        "figures": [t.makespan, t.bubble_fraction, t.bubble_ratio, t.span_bubble_fraction],
        "peaks": list(t.peak_in_flight),
        "busy": list(t.busy),
        "held": [[list(step) for step in zip(*curve, strict=True)] for curve in lab.held_over_time(t)],
        "path": [[s.rank, str(s.action), s.start] for s in critical_path(t)],
        "idle": [
            [i.rank, i.start, i.end, phases[i.phase], i.waits_for and str(i.waits_for), i.on_rank, i.until]
            for i in idle_intervals(t)
        ],
    }


def agree(evaluate: Evaluate, configurations: list[dict], batch: int = 100) -> None:
    for first in range(0, len(configurations), batch):
        some = configurations[first : first + batch]
        for configuration, said in zip(some, evaluate(f"{json.dumps(some)}.map(report)"), strict=True):
            assert said == expected(**configuration), configuration


def number(rng: random.Random) -> float:
    return rng.choice([rng.randint(0, 4), round(rng.uniform(0, 4), 1), rng.uniform(0, 4)])


def random_costs(rng: random.Random) -> dict:
    """Durations as `Costs` takes them, the same on every stage, never all of nothing."""
    costs = {"forward": rng.choice([1, 0.7, rng.uniform(0.1, 3)]), "backward_input": number(rng)}
    costs |= {"backward_weight": number(rng), "latency": rng.choice([0, 0.5, number(rng)])}
    if rng.random() < 0.3:
        costs["backward"] = number(rng)
    return costs | {"overlap": rng.choice(["sum", "max", number(rng)])}


def configurations(name: str, most_ranks: int, most_microbatches: int, times: int = 1) -> list[dict]:
    """Every size up to those, with every number of stages per rank where it can be chosen, each under random costs."""
    rng = random.Random(name)
    stages = (1, 2, 3) if "stages_per_rank" in find(name).options else (None,)
    sizes = product(range(1, most_ranks + 1), range(1, most_microbatches + 1), stages)
    return [configuration(name, *size, random_costs(rng)) for size in sizes for _ in range(times)]


def configuration(name: str, P: int, M: int, V: int | None, costs: dict) -> dict:
    return {"name": name, "num_ranks": P, "num_microbatches": M, "costs": costs} | (
        {"stages_per_rank": V} if V is not None else {}
    )


def is_searched(name: str) -> bool:
    return "limit" in find(name).options


def skip_unless_made(evaluate: Evaluate, name: str) -> None:
    """Skip a schedule of which the page has no more than the package's rows for some sizes."""
    if not evaluate(f"{json.dumps(name)} in pplab.builders"):
        wanted = f"builders[{json.dumps(name)}] = (P, M, options) => rows"
        pytest.skip(f"the page has {name} for some sizes at most: for all, write {wanted} in core.js")


@pytest.mark.parametrize("name", [name for name in NAMES if not is_searched(name)])
def test_every_action_and_figure(evaluate: Evaluate, name: str) -> None:
    """All small sizes. An order that depends on the costs is compared under more of them."""
    skip_unless_made(evaluate, name)
    agree(evaluate, configurations(name, 4, 12, 2 if "costs" in find(name).options else 1))


@pytest.mark.parametrize("name", [name for name in NAMES if not is_searched(name)])
def test_the_largest_that_the_page_must_handle(evaluate: Evaluate, name: str) -> None:
    """Up to 8 ranks and 32 microbatches, those two numbers included."""
    skip_unless_made(evaluate, name)
    rng = random.Random(name)
    V = 3 if "stages_per_rank" in find(name).options else None
    sizes = [(5, 11), (6, 12), (7, rng.randint(9, 31)), (8, rng.randint(16, 31))]
    agree(evaluate, [configuration(name, P, M, V, random_costs(rng)) for P, M in sizes])
    largest = configuration(name, 8, 32, V, {"backward_weight": 0.7, "latency": 0.3})
    assert "error" not in expected(**largest)
    agree(evaluate, [largest])


@pytest.mark.parametrize("name", [name for name in NAMES if is_searched(name)])
def test_every_searched_action_and_figure(evaluate: Evaluate, name: str) -> None:
    skip_unless_made(evaluate, name)
    rng = random.Random(name)
    sizes = [(2, 8), (3, 7), (4, 6), (4, 9), (5, 8)]
    agree(evaluate, [configuration(name, P, M, None, random_costs(rng)) for P, M in sizes])
    agree(evaluate, configurations(name, 3, 5))


def test_searches_that_a_rare_preference_decides(evaluate: Evaluate) -> None:
    """A gap as long as the weight gradient, an eager one, a later warm-up: random costs seldom tell them apart."""
    decided = [
        ("ZB-1P", 4, 7, {"forward": 4, "backward_input": 0.5, "backward_weight": 2, "latency": 2}),
        ("ZB-2P", 3, 3, {"forward": 4, "backward_input": 0.5, "backward_weight": 1, "latency": 1}),
        ("ZB-2P", 4, 8, {"forward": 1, "backward_input": 3, "backward_weight": 2, "latency": 1}),
        ("ZB-2P", 3, 4, {"forward": 3, "backward_input": 1, "backward_weight": 2, "latency": 2}),
        ("ZB-2P", 2, 8, {"forward": 1, "backward_input": 1, "backward_weight": 1.5, "latency": 0}),
    ]
    agree(evaluate, [configuration(name, P, M, None, costs) for name, P, M, costs in decided])


def test_the_registry(evaluate: Evaluate) -> None:
    """What the page says of the schedules is what the package says; the page makes rows of no others."""
    from pplab_schedules import in_javascript

    said = evaluate("pplab.schedules")
    for b, schedule in zip(ALL, said, strict=True):
        told = {"name": b.name, "aliases": list(b.aliases), "rules": b.rules, "source": b.source}
        told |= {"placement": b.placement, "options": list(b.options)}
        assert {key: schedule[key] for key in told} == told
        for name in (b.name.upper(), *b.aliases):
            assert evaluate(f"pplab.find({json.dumps(name)}).name") == b.name
    made = evaluate("Object.keys(pplab.builders)")
    assert in_javascript() == set(made) <= set(NAMES)
    assert [schedule["name"] for schedule in said if "rows" in schedule] == [n for n in NAMES if n not in made]


@pytest.fixture
def newer(evaluate: Evaluate) -> Iterator[Evaluate]:
    """The page built when the package has three schedules more."""
    from pplab_schedules import schedules

    @register("newer", aliases=("new",))
    def _newer(num_ranks: int, num_microbatches: int):
        return find("DualPipe").rows(num_ranks, num_microbatches)

    @register("newer loop")
    def _loop(num_ranks: int, num_microbatches: int, *, stages_per_rank: int = 2):
        return find("LoopedBFS").rows(num_ranks, num_microbatches, stages_per_rank=stages_per_rank)

    @register("newer choice")
    def _choice(num_ranks: int, num_microbatches: int, *, costs: Costs | None = None):
        return find("V-Min").rows(num_ranks, num_microbatches, costs=costs)

    evaluate(f"(kept = pplab, pplab = pplab.make({json.dumps(schedules())}), 0)")
    yield evaluate
    evaluate("(pplab = kept, 0)")
    del ALL[-3:]


@pytest.mark.parametrize("name", ["newer", "newer loop"])
def test_a_schedule_that_only_the_package_has_is_there_in_some_sizes(newer: Evaluate, name: str) -> None:
    rng = random.Random(name)
    V = 2 if "loop" in name else None
    configurations = [configuration(name, P, M, V, random_costs(rng)) for P, M in product((2, 4, 8), (4, 8, 16, 32))]
    assert sum("error" in expected(**each) for each in configurations) == (0 if V else 3)  # 8 x 8 and less
    agree(newer, configurations)
    said = newer(f"report({json.dumps(configuration(name, 3, 4, V, {}))})")
    assert said["error"].startswith(f"the page has {name} for some sizes only, not for 3 ranks and 4 microbatches: ")


def test_an_order_for_given_costs_needs_the_pages_own_rows(newer: Evaluate) -> None:
    said = newer(f"report({json.dumps(configuration('newer choice', 4, 8, None, {}))})")
    assert said["error"].startswith("newer choice is not in the page yet: its order depends on the costs")


def test_a_name_that_no_schedule_has(evaluate: Evaluate) -> None:
    with pytest.raises(ValueError) as error:
        pplab.build("xyz's", num_ranks=2, num_microbatches=4)
    assert evaluate('refused(() => pplab.build("xyz\'s", { numRanks: 2, numMicrobatches: 4 }))') == str(error.value)


@pytest.mark.parametrize("name", NAMES)
def test_sizes_that_no_schedule_takes(evaluate: Evaluate, name: str) -> None:
    """What an address or a field can hold: any number, and what isn't one."""
    sizes = [(0, 4), (2, 0), (-1, 4), (1.5, 4), (2, float("nan")), (float("inf"), 2)]
    stages = [0, -1, 1.5, float("nan")] if "stages_per_rank" in find(name).options else []
    agree(evaluate, [configuration(name, *size, None, {}) for size in sizes])
    agree(evaluate, [configuration(name, 3, 4, V, {}) for V in stages])
    assert all("error" in expected(**configuration(name, *size, None, {})) for size in sizes)


@pytest.mark.parametrize("name", ["forward", "backward_input", "backward_weight", "backward", "latency", "overlap"])
def test_costs_that_are_refused(evaluate: Evaluate, name: str) -> None:
    wrong = [
        {name: value} for value in (-1, float("nan"), float("inf"), *(["least", "it's"] if name == "overlap" else []))
    ]
    agree(evaluate, [configuration("GPipe", 2, 2, None, costs) for costs in wrong])
    assert all("error" in expected(**configuration("GPipe", 2, 2, None, costs)) for costs in wrong)


def test_finer_costs(evaluate: Evaluate) -> None:
    rng = random.Random(0)
    for _ in range(50):
        costs, by = random_costs(rng), rng.randint(1, 4)
        said = evaluate(f"pplab.costs(camelled({json.dumps(costs)})).finer({by})")
        for page, python in [("backwardInput", "backward_input"), ("backwardWeight", "backward_weight")]:
            said[python] = said.pop(page)
        del said["ofOverlap"]
        assert said == {name: getattr(Costs(**costs).finer(by), name) for name in said}


@pytest.mark.parametrize("per", ["rank", "stage", "batch"])
def test_settings_mean_the_same_to_the_page_and_to_a_cell(evaluate: Evaluate, per: str) -> None:
    """A view's settings are what `explore` takes. Searches, which run beside the page, are compared in a browser."""
    rng = random.Random(per)
    made = set(evaluate("Object.keys(pplab.builders)"))
    for name in [name for name in NAMES if name in made and not is_searched(name)]:
        for _ in range(4):
            sizes = {
                "ranks": rng.choice([2, 4]),
                "microbatches": rng.randint(8, 10),
                "stages-per-rank": rng.randint(1, 3),
            }
            durations = {key: number(rng) for key in ("backward-input", "backward-weight", "latency")}
            pair = {"overlap": rng.choice(["sum", "max"]), "pair": rng.choice([0, number(rng)])}
            state = {"forward": 1, **sizes, **durations, **pair, "per": per}
            given = json.dumps(state), json.dumps(name)
            timeline = "pplabSettings.timelineOf(state, pplabSettings.scheduleOf(state, name))"
            code = (
                f"((given, name) => {{ const state = {{ ...pplabSettings.DEFAULTS, ...given }}; let said; "
                f"const error = refused(() => (said = reportOf({timeline}))); return said || {{ error }}; }})"
            )
            said = evaluate(f"{code}({', '.join(given)})")
            try:
                wanted = expected_of(*explored(name, **{key.replace("-", "_"): value for key, value in state.items()}))
            except ValueError as error:
                wanted = {"error": str(error)}
            assert said == wanted, (name, state)


def rows_of(schedule: Schedule) -> list[list[str]]:
    return [[str(item) for item in row] for row in schedule.rows]


def random_rows(rng: random.Random) -> list[list[str]]:
    """Of a schedule by hand: random placement and order, overlaps, one or two copies of the stages."""
    return rows_of(random_schedule(rng, overlap_share=rng.choice([0, 0.5]), bidirectional=rng.random() < 0.3))


def test_schedules_made_by_hand(evaluate: Evaluate) -> None:
    rng = random.Random(1)
    made = [(random_rows(rng), random_costs(rng)) for _ in range(400)]
    code = "pplab.schedule(rows, 'mine'), pplab.costs(camelled(costs))"
    said = evaluate(f"{json.dumps(made)}.map(([rows, costs]) => reportOf(pplab.simulate({code})))")
    for (rows, costs), each in zip(made, said, strict=True):
        assert each == expected_of(simulate(Schedule(rows), Costs(**costs))), rows


def test_ranks_that_wait_for_each_other_have_no_timeline(evaluate: Evaluate) -> None:
    rows = [["0B0", "0F0"], ["1F0", "1B0"]]
    said = evaluate(f"refused(() => pplab.simulate(pplab.schedule({json.dumps(rows)})))")
    assert said == "the ranks wait for each other, and nothing more can run"


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


@pytest.mark.parametrize("name", NAMES)
def test_an_idle_interval_says_why(evaluate: Evaluate, name: str) -> None:
    skip_unless_made(evaluate, name)
    said = evaluate(
        f"pplab.idle(pplab.simulate(pplab.build({json.dumps(name)}, {{ numRanks: 4, numMicrobatches: 8 }}), "
        "pplab.costs({ latency: 0.25 })))"
    )
    for idle in said:
        if idle["part"] == "drain":
            assert idle["text"] == "it has nothing left to do" and idle["for"] is None
        else:
            other, text = idle["for"], f"it waits for {idle['waitsFor']}, which runs on rank "
            assert idle["waitsFor"] in other["item"]["text"] and other["end"] == idle["until"]
            assert (
                idle["text"]
                == f"{text}{other['rank']} until {other['end']:g} and whose result arrives at {idle['end']:g}"
            )


@pytest.mark.skipif(not HAS_QUICKJS, reason="all other tests ran in a browser")
def test_a_browser_says_the_same() -> None:
    rng = random.Random(5)
    with opened(chromium_engine) as evaluate:
        made = evaluate("Object.keys(pplab.builders)")
        sizes = [(2, 4), (3, 3), (2, 5)]
        agree(evaluate, [configuration(name, P, M, None, random_costs(rng)) for name in made for P, M in sizes])
