"""The explorer's JavaScript against the package: the same rows, times, figures and reasons, and the same refusals."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from html import unescape
from itertools import product
from urllib.parse import parse_qs

import pytest

import browser
import pplab
from conftest import random_schedule
from javascript import Evaluate, loaded
from pplab import Costs, Schedule, Span, Timeline, lab, simulate
from pplab.actions import Action, parts
from pplab.builders import find, known, register
from pplab.builders.registry import ALL
from pplab.deps import needs
from pplab.lab import num_messages
from pplab.lab.forms import STATIC
from pplab.timeline import critical_path, idle_intervals
from pplab_course.frames import explored

NAMES = [b.name for b in known()]


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
    costs["overhead"] = rng.choice([0, 0, 0.25, number(rng)])
    if rng.random() < 0.3:
        costs["backward"] = number(rng)
    return costs | {"overlap": rng.choice(["sum", "max", number(rng)])}


def configurations(name: str, most_ranks: int, microbatches: Iterable[int], times: int = 1) -> list[dict]:
    """Every number of ranks up to that with these of microbatches, and every number of stages per rank where it can be
    chosen, each under random costs."""
    rng = random.Random(name)
    stages = (1, 2, 3) if "stages_per_rank" in find(name).options else (None,)
    sizes = product(range(1, most_ranks + 1), microbatches, stages)
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
    """All small sizes, then only multiples of the ranks: test_the_largest has others. An order that depends on the
    costs is compared under more of them."""
    skip_unless_made(evaluate, name)
    agree(evaluate, configurations(name, 4, (*range(1, 7), 8, 12), 2 if "costs" in find(name).options else 1))


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
def test_what_the_package_found_for_equal_times(evaluate: Evaluate, name: str) -> None:
    """The page searches for nothing: it has these rows, and for other times it says where to get them."""
    equal = [{}, dict.fromkeys(("forward", "backward_input", "backward_weight"), 2)]
    agree(evaluate, [configuration(name, P, M, None, costs) for P, M in ((2, 8), (4, 4), (8, 32)) for costs in equal])
    for other in ({"forward": 2}, {"backward_weight": 0}, {"latency": 0.5}, {"overhead": 1}, {"forward": [1, 1]}):
        said = evaluate(f"report({json.dumps(configuration(name, 2, 4, None, other))})")["error"]
        assert said.startswith(f"the order of {name} depends on the costs, and the page has it for equal ones: ")
        assert said.endswith("build it with the package, and open it with lab.explore")


def test_slices_of_any_number(evaluate: Evaluate) -> None:
    rng = random.Random(0)
    for name in ("Seq1F1B", "TeraPipe"):
        sizes = product(range(1, 6), (1, 6, 12, 20), (1, 3, 4, 5, 0))
        stages = (1, 2) if name == "Seq1F1B" else (None,)
        some = [configuration(name, P, M, V, random_costs(rng)) | {"slices": k} for P, M, k in sizes for V in stages]
        agree(evaluate, some)
        assert 20 < sum("error" in expected(**each) for each in some) < len(some) / 2 + 40


def test_the_registry(evaluate: Evaluate) -> None:
    """What the page says of the schedules is what the package says; the page makes rows of no others."""
    from pplab_schedules import in_javascript

    said = evaluate("pplab.schedules")
    for b, schedule in zip(known(), said, strict=True):
        told = {"name": b.name, "aliases": list(b.aliases), "rules": b.rules, "source": b.source}
        told |= {"placement": b.placement, "options": list(b.options)}
        assert {key: schedule[key] for key in told} == told
        for name in (b.name.upper(), *b.aliases):
            assert evaluate(f"pplab.find({json.dumps(name)}).name") == b.name
    made = evaluate("Object.keys(pplab.builders)")
    assert in_javascript() == set(made) <= set(NAMES)
    assert [schedule["name"] for schedule in said if "rows" in schedule] == [n for n in NAMES if n not in made]


def test_the_page_and_the_directive_know_the_same_settings(evaluate: Evaluate) -> None:
    from pplab_explorer import SETTINGS

    assert evaluate("pplabSettings.DEFAULTS") == {name: default for name, (_, default) in SETTINGS.items()}


@pytest.fixture
def newer(evaluate: Evaluate) -> Iterator[Evaluate]:
    """The page built when the package has three schedules more."""
    from pplab_schedules import script

    @register("newer", aliases=("new",))
    def _newer(num_ranks: int, num_microbatches: int):
        return find("DualPipe").rows(num_ranks, num_microbatches)

    @register("newer loop")
    def _loop(num_ranks: int, num_microbatches: int, *, stages_per_rank: int = 2):
        return find("LoopedBFS").rows(num_ranks, num_microbatches, stages_per_rank=stages_per_rank)

    @register("newer choice")
    def _choice(num_ranks: int, num_microbatches: int, *, costs: Costs | None = None):
        return find("V-Min").rows(num_ranks, num_microbatches, costs=costs)

    again = f"{script()}\n{(STATIC / 'core.js').read_text()}\n;0"
    evaluate(f"(kept = pplab, (0, eval)({json.dumps(again)}))")
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


def test_an_order_for_given_costs_is_there_for_equal_ones(newer: Evaluate) -> None:
    agree(newer, [configuration("newer choice", 4, 8, None, {})])
    said = newer(f"report({json.dumps(configuration('newer choice', 4, 8, None, {'forward': 2}))})")
    assert said["error"].startswith("the order of newer choice depends on the costs, and the page has it for equal")


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


@pytest.mark.parametrize(
    "name", ["forward", "backward_input", "backward_weight", "backward", "overhead", "latency", "overlap"]
)
def test_costs_that_are_refused(evaluate: Evaluate, name: str) -> None:
    wrong = [
        {name: value} for value in (-1, float("nan"), float("inf"), *(["least", "it's"] if name == "overlap" else []))
    ]
    agree(evaluate, [configuration("GPipe", 2, 2, None, costs) for costs in wrong])
    assert all("error" in expected(**configuration("GPipe", 2, 2, None, costs)) for costs in wrong)


def test_finer_costs(evaluate: Evaluate) -> None:
    rng = random.Random(0)
    for _ in range(50):
        costs, by = costs_per_stage(rng, 3), rng.randint(1, 4)
        said = evaluate(f"pplab.costs(camelled({json.dumps(costs)})).finer({by})")
        for page, python in [("backwardInput", "backward_input"), ("backwardWeight", "backward_weight")]:
            said[python] = said.pop(page)
        finer = Costs(**costs).finer(by)
        values = {name: getattr(finer, name) for name in said}
        assert said == {name: list(value) if type(value) is tuple else value for name, value in values.items()}


@pytest.mark.parametrize("per", ["rank", "stage", "batch"])
def test_settings_mean_the_same_to_the_page_and_to_a_cell(evaluate: Evaluate, per: str) -> None:
    """A view's settings are what `explore` takes."""
    rng = random.Random(per)
    made = set(evaluate("Object.keys(pplab.builders)"))
    for name in ["own", *(name for name in NAMES if name in made)]:
        for _ in range(4):
            sizes = {
                "ranks": rng.choice([2, 4]),
                "microbatches": rng.randint(8, 10),
                "stages-per-rank": rng.randint(1, 3),
                "slices": rng.randint(0, 4),
                "attention": rng.choice([0, 0.5, rng.random(), rng.random(), 2]),
            }
            durations = {key: number(rng) for key in ("backward-input", "backward-weight", "overhead", "latency")}
            if rng.random() < 0.3:  # of as many stages as some schedules have
                durations["backward-input"] = [number(rng) for _ in range(sizes["ranks"] * 2)]
            pair = {"overlap": rng.choice(["sum", "max"]), "pair": rng.choice([0, number(rng)])}
            state = {"forward": 1, **sizes, **durations, **pair, "per": per}
            state["more-in-flight"] = rng.choice([0, 3, -2])
            if name == "own":
                state["rows"] = parse_qs(lab.explore(Schedule(random_rows(rng))).fragment)["rows"][0]
            given = json.dumps(state), json.dumps(name)
            timeline = "pplabSettings.timelineOf(state, pplabSettings.scheduleOf(state, name))"
            if name == "own":
                timeline = (
                    "pplabSettings.ownTimelines({ ...state, rows: pplabRows.unpack(state.rows) }, []).timelines[0]"
                )
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


def test_sliced_settings_mean_the_same(evaluate: Evaluate) -> None:
    """Slices that take longer the later they come, as `lab.Slices` says."""
    rng = random.Random(3)
    for _ in range(60):
        name = rng.choice(["Seq1F1B", "TeraPipe"])
        state = {"ranks": rng.randint(1, 5), "microbatches": rng.randint(1, 9), "slices": rng.randint(1, 7)}
        state |= {"stages-per-rank": rng.randint(1, 3), "attention": rng.choice([0, 0.3, 1, rng.random()])}
        state |= {"forward": 0.1 + number(rng), "latency": number(rng), "overhead": rng.choice([0, number(rng)])}
        state["per"] = rng.choice(["rank", "stage", "batch"])
        made = "pplabSettings.timelineOf(state, pplabSettings.scheduleOf(state, name))"
        code = f"((state, name) => reportOf({made}))"
        said = evaluate(f"{code}({{ ...pplabSettings.DEFAULTS, ...{json.dumps(state)} }}, {json.dumps(name)})")
        wanted = explored(name, **{key.replace("-", "_"): value for key, value in state.items()})
        assert said == expected_of(*wanted), (name, state)


def rows_of(schedule: Schedule) -> list[list[str]]:
    return [[str(item) for item in row] for row in schedule.rows]


def random_rows(rng: random.Random) -> list[list[str]]:
    """Of a schedule by hand: random placement and order, overlaps, one or two copies of the stages."""
    return rows_of(random_schedule(rng, overlap_share=rng.choice([0, 0.5]), bidirectional=rng.random() < 0.3))


def costs_per_stage(rng: random.Random, num_stages: int) -> dict:
    """Random costs, of which some are a list: one value for each stage."""
    costs = random_costs(rng)
    for name in ("forward", "backward_input", "backward_weight", "backward", "overhead"):
        if name in costs and rng.random() < 0.5:
            costs[name] = [rng.choice([1, number(rng)]) for _ in range(num_stages)]
    return costs | {"forward": [each or 0.5 for each in costs["forward"]]} if type(costs["forward"]) is list else costs


def test_the_loop(evaluate: Evaluate) -> None:
    """Items in rows, which wait for items of any row, of none, or in a circle: as far as looking at them again and
    again gets them."""
    rng = random.Random(6)
    made = []
    for _ in range(300):
        items = [*range(rng.randint(1, 24))]
        needs = [rng.choice([None, None, rng.randrange(rng.choice([i + 1, len(items)]))]) for i in items]
        rows = [[] for _ in range(rng.randint(1, 5))]
        for i in items if rng.random() < 0.5 else rng.sample(items, rng.randint(1, len(items))):
            rng.choice(rows).append(i)
        made.append([rows, needs, *([number(rng) for _ in items] for _ in range(2))])
    said = evaluate(f"{json.dumps(made)}.map((turns) => pplab.run(...turns))")
    ran = [run_again_and_again(*turns) for turns in made]
    assert [tuple(each) for each in said] == ran
    stuck = [
        any(starts[i] is None for row in rows for i in row) for (rows, *_), (starts, _) in zip(made, ran, strict=True)
    ]
    assert 50 < sum(stuck) < 250


def run_again_and_again(rows: list, needs: list, durations: list, lags: list) -> tuple[list, list]:
    starts, ends = ([None] * len(needs) for _ in range(2))
    for _ in needs:
        for row in rows:
            now = 0
            for i in row:
                if needs[i] is not None:
                    if ends[needs[i]] is None:
                        break
                    now = max(now, ends[needs[i]] + lags[i])
                starts[i], ends[i] = now, now + durations[i]
                now = ends[i]
    return starts, ends


def per_microbatch(rng: random.Random, costs: dict, num_stages: int, num_microbatches: int) -> dict:
    """These costs, of which some stages' durations become a list: one value for each microbatch."""
    for name in ("forward", "backward_input", "backward_weight", "backward", "overhead"):
        if name in costs and rng.random() < 0.5:
            stages = costs[name] if type(costs[name]) is list else [costs[name]] * num_stages
            own = [[0.25 + number(rng) for _ in range(num_microbatches)] for _ in stages]
            costs[name] = [rng.choice(pair) for pair in zip(stages, own, strict=True)]
    return costs


def test_schedules_made_by_hand(evaluate: Evaluate) -> None:
    rng = random.Random(1)
    rows = [random_rows(rng) for _ in range(400)]
    made = [(each, costs_per_stage(rng, Schedule(each).num_stages)) for each in rows]
    for each, costs in made[::2]:
        per_microbatch(rng, costs, Schedule(each).num_stages, Schedule(each).num_microbatches)
    assert sum(Costs(**costs).by_microbatch for _, costs in made) > 100
    code = "pplab.schedule(rows, 'mine'), pplab.costs(camelled(costs))"
    said = evaluate(f"{json.dumps(made)}.map(([rows, costs]) => reportOf(pplab.simulate({code})))")
    for (rows, costs), each in zip(made, said, strict=True):
        assert each == expected_of(simulate(Schedule(rows), Costs(**costs))), rows


def test_a_block_takes_times_per_stage(evaluate: Evaluate) -> None:
    for given in ([1, 3, 2], [1, 3, 2, 2]):  # too few, and one for each stage
        agree(evaluate, [configuration(name, 2, 3, None, {"forward": given}) for name in ("V-Min", "V-Half")])


@pytest.mark.parametrize("name", ["forward", "backward_input", "backward_weight", "overhead"])
def test_a_list_of_times_has_one_for_each_stage(evaluate: Evaluate, name: str) -> None:
    for values in ([1, 2], [1, 2, 3], [1, -1, 1, 1], []):
        some = configuration("1F1B", 4, 4, None, {name: values})
        said, wanted = evaluate(f"report({json.dumps(some)})"), expected(**some)
        assert said == wanted if -1 not in values else "error" in said and "error" in wanted


def test_a_stages_list_of_times_has_one_for_each_microbatch(evaluate: Evaluate) -> None:
    """And none where all microbatches have to take the same, or in a list of such lists."""
    wrong = [[1, [1, 2, 3]], [[1], 1], [[], 1], [[1, 1, 1, 1]], [[1, -1, 1, 1], 1]]
    made = [configuration("1F1B", 2, 4, None, {"forward": each}) for each in wrong]
    agree(evaluate, made)
    assert expected(**made[0])["error"].startswith("forward of stage 1 has 3 values for 4 microbatches: give one per ")
    agree(evaluate, [each := configuration("V-Min", 2, 4, None, {"backward_weight": [[1, 2, 3, 4], 1, 1, 1]})])
    assert "error" not in expected(**each)
    deep = configuration("1F1B", 1, 1, None, {"forward": [[[1]]]})
    for error in (expected(**deep)["error"], evaluate(f"report({json.dumps(deep)})")["error"]):
        assert error.startswith("forward must be a number from 0 to 1e+100, got ")


def test_measured_timelines(evaluate: Evaluate) -> None:
    """As they were: the package's times, whatever the schedule would take by itself."""
    rng = random.Random(2)
    for _ in range(60):
        t = simulate(Schedule(random_rows(rng)), Costs(**random_costs(rng)))
        late = 1 + rng.random()
        starts, ends = ([late * x for x in times] for times in (t.starts, t.ends))
        measured = Timeline(
            t.schedule, starts, ends, "ms", "measured", (Span(0, "optimizer", max(ends), max(ends) + 1),)
        )
        record = json.dumps(lab.timeline_to_dict(measured))
        said = evaluate(f"pplabRows.records({record}).map(({{ timeline }}) => reportOf(timeline))[0]")
        assert said == expected_of(measured)
        others = evaluate(f"pplabRows.records({record})[0].timeline.idle.filter(({{ part }}) => part === 'other')")
        assert [(o["text"], o["start"], o["end"]) for o in others] == [("optimizer", max(ends), max(ends) + 1)]


def harmed(rng: random.Random, rows: list[list[str]]) -> list[list[str]]:
    """Rows with a fault or two, of the kinds that `validate` knows; some can run all the same."""
    rows = [list(row) for row in rows]
    for _ in range(rng.randint(1, 2)):
        row = rng.choice([row for row in rows if row])
        i, how = rng.randrange(len(row)), rng.choice(["late", "late", "drop", "twice", "move", "kind", "send", "stage"])
        if how == "late":  # a circle of ranks, where no rank has its own actions out of order
            later = [k for k in range(i, len(row)) if row[k].lstrip("0123456789")[:1] == "F"]
            row.insert(rng.choice(later or [i]), row.pop(i))
        elif how == "drop" and sum(map(len, rows)) > 1:
            row.pop(i)
        elif how == "twice":
            rng.choice(rows).insert(0, row[i])
        elif how == "move" and sum(map(len, rows)) > 1:
            rng.choice(rows).append(row.pop(i))
        elif how == "kind" and "(" not in row[i]:
            row[i] = row[i].translate(str.maketrans("FBIW", rng.choice(["BFWI", "IBFW", "FIBW"])))
        elif how == "send":
            row.insert(i, "0SEND_F0")
        elif how == "stage" and "(" not in row[i]:
            row[i] = f"{rng.randint(0, 9)}{row[i].lstrip('0123456789')}"
    return rows


def why(call: Callable, *given: object) -> str | None:
    try:
        call(*given)
    except ValueError as error:
        return str(error)
    return None


def test_rows_that_cannot_run_are_refused_in_the_packages_words(evaluate: Evaluate) -> None:
    rng = random.Random(3)
    made = [harmed(rng, random_rows(rng)) for _ in range(500)]
    made += [[["0F0", "0B0"], []], [["0F0"], ["2F0"]], [["0F99999999", "99999999B0"]], [["0F0", "0B0"], ["0F1", "0B1"]]]
    said = evaluate(f"{json.dumps(made)}.map((rows) => refused(() => pplabRows.validate(pplab.schedule(rows))))")
    wanted = [why(lambda rows: pplab.validate(Schedule(rows)), rows) for rows in made]
    assert list(zip(made, said, strict=True)) == list(zip(made, wanted, strict=True))
    for words in ("deadlock", "missing", "twice", "before", "lives on", "communication"):
        assert sum(words in (text or "") for text in wanted) > 5, words
    assert 50 < wanted.count(None) < 250


def test_how_far_rows_get(evaluate: Evaluate) -> None:
    """Rows that can run get to the end, at the package's times; others to where each rank waits for what never runs."""
    rng = random.Random(4)
    made = [random_rows(rng) for _ in range(40)]
    broken = (harmed(rng, random_rows(rng)) for _ in range(400))
    counts = [(rows, Counter(re.findall(r"\d+[FBW]\d+", str(rows).replace("I", "B")))) for rows in broken]
    made += [rows for rows, count in counts if max(count.values()) == 1]  # it's clear who makes what
    made = [(rows, costs_per_stage(rng, Schedule(rows).num_stages)) for rows in made if "SEND" not in str(rows)]
    code = "pplabRows.reach(pplab.schedule(rows), pplab.costs(camelled(costs)))"
    said = evaluate(f"{json.dumps(made)}.map(([rows, costs]) => {code}.byRank)")
    for i, ((rows, costs), each) in enumerate(zip(made, said, strict=True)):
        times = [[(span["start"], span["end"]) for span in row] for row in each]
        assert times == (reached := how_far(Schedule(rows), Costs(**costs))), rows
        if i < 40:
            assert reached == [
                [(s.start, s.end) for s in simulate(Schedule(rows), Costs(**costs)).spans_of(r)]
                for r in range(len(rows))
            ]
    assert sum(sum(map(len, each)) < sum(map(len, rows)) for (rows, _), each in zip(made, said, strict=True)) > 100
    sends = json.dumps(
        [["0F0", "0B0"], ["1F0", "1B0", "1SEND_B0"]]
    )  # communication is refused, and nobody waits for it
    idle = evaluate(f"pplabRows.reach(pplab.schedule({sends})).idle")
    assert [each["waitsFor"] for each in idle if each["part"] == "wait"] == ["1B0"]
    rows = [["0F0", "0B0", "0F1", "0B1"], ["1F0", "1F1", "1B0", "1B1"]]
    said = evaluate(f"pplabRows.reach(pplab.schedule({json.dumps(rows)}, 'mine'), pplab.costs({{latency: 3}}))")
    assert said["title"] == "mine: stuck after 2 of 8 actions"
    assert [[span["item"]["text"], span["start"]] for span in said["spans"]] == [["0F0", 0], ["1F0", 4]]
    stuck = [
        (idle["rank"], idle["start"], idle["at"], idle["text"]) for idle in said["idle"] if idle["part"] == "stuck"
    ]
    assert stuck == [
        (0, 1, "0B0", "it waits at 0B0 for 1B/I0, which never runs"),
        (1, 5, "1F1", "it waits at 1F1 for 0F1, which never runs"),
    ]


def how_far(schedule: Schedule, costs: Costs) -> list[list[tuple[float, float]]]:
    """Of every rank, when the items start and end that it gets to: each has to find all that it needs."""
    reached, made = [[] for _ in schedule.rows], {}  # made: of every action that has run, its rank and its end
    for _ in range(sum(map(len, schedule.rows))):
        for rank, row in enumerate(schedule.rows):
            for item in row[len(reached[rank]) :]:
                needed = [need for part in parts(item) for need in needs(part, schedule.num_stages)]
                named = [[Action(need.stage, kind, need.microbatch) for kind in need.kinds] for need in needed]
                makers = [next((made[each] for each in some if each in made), None) for some in named]
                if None in makers:
                    break
                free = reached[rank][-1][1] if reached[rank] else 0
                start = max([free, *(end + costs.latency * (rank != other) for other, end in makers)])
                reached[rank].append((start, start + costs.of_item(item)))
                made |= {part: (rank, reached[rank][-1][1]) for part in parts(item)}
    return reached


CSV = [
    "0F0,0B0\n1F0,1B0\n",
    " 0F0 ,, 0B0,\r\n1F0,1B0\r\n,,\n\n",
    '"0F0","0B0"\n1F0,1B0',
    "0F0,0SEND_F0,0UNSHARD,0B0,0WAIT_SEND_F0,0WAIT_REDUCE_GRAD\n1RECV_F0,1F0,1B0",
    "0F0,(0F1;0B0)OVERLAP_F_B,0B1",
    "0F0,(0F1;0I0)OVERLAP_F_I,(0W0;0I1)OVERLAP_W_I,0W1",
    "0F0,(0B1;0B0)OVERLAP_F_B,0B1",
    "0F0,(0F0;0B0)OVERLAP_F_B",
    "0F0,(0F1;0SEND_F0)OVERLAP_F_B",
    "0F0,0X0\n",
    "0F0,0B0\n1F0,hello",
    "",
    "\n \n,,",
    "0F0,0B0\n\n1F0,1B0",
]


@pytest.mark.parametrize("text", CSV)
def test_csv_is_read_as_the_package_reads_it(evaluate: Evaluate, text: str) -> None:
    said = evaluate(f"refused(() => (found = pplabRows.read({json.dumps(text)}))) || textsOf(found)")
    try:
        wanted = rows_of(lab.read_csv(text + "\n"))
    except ValueError as error:
        wanted = str(error)
    assert said == wanted


def test_other_texts_of_rows(evaluate: Evaluate) -> None:
    """What `print(schedule)` shows, blanks between actions, and an address; prose is refused."""
    schedule = pplab.build("DualPipeV", num_ranks=2, num_microbatches=4)
    spaced = "\n".join(" ".join(row) for row in rows_of(schedule))
    address = json.dumps(lab.explore(schedule).fragment)
    file = "\ufeff" + lab.to_csv(schedule)  # as a spreadsheet writes it
    for text in (*map(json.dumps, (str(schedule), spaced, file)), f"pplabSettings.decode({address}).rows"):
        assert evaluate(f"textsOf(pplabRows.read({text}))") == rows_of(schedule)
    assert evaluate(f"pplabSettings.encode(pplabSettings.decode({address}))").endswith(
        lab.explore(schedule).fragment.rpartition("&")[2]
    )
    assert "'To' is not an action" in evaluate("refused(() => pplabRows.read('To be, or not to be'.replace(',', '')))")


def test_what_is_no_record_is_refused(evaluate: Evaluate) -> None:
    good = lab.timeline_to_dict(simulate(pplab.build("GPipe", num_ranks=2, num_microbatches=2)))
    spans = good["spans"]
    wrong = [{}, [], None, 3, {"timelines": []}, {"rows": 3}, {"rows": [[1]]}, good | {"spans": spans[1:]}]
    wrong += [good | {"spans": [[0, "0F0", 0, "late"], *spans[1:]]}, good | {"rows": [["0F0", "x"]]}]
    still = [[rank, text, 3, 3] for rank, text, *_ in spans]
    wrong += [good | {"spans": strange} for strange in (5, {"length": len(spans)}, [None] * len(spans), still)]
    wrong += [good | {"others": strange} for strange in (5, None, "x", [5], [["length", "x", 0, 1]], [[0, None, 0, 1]])]
    wrong += [good | {name: {"toString": 1}} for name in ("schedule", "unit", "how")]
    for data in wrong:
        said = evaluate(f"refused(() => pplabRows.records({json.dumps(data)}))")
        assert said and "TypeError" not in said and not said.startswith("Cannot"), (data, said)
        with pytest.raises(ValueError):
            lab.timeline_from_dict(data)
    assert evaluate(f"pplabRows.records({json.dumps({'timelines': [good, good]})}).length") == 2


@pytest.mark.parametrize(
    "costs",
    [
        Costs(),
        Costs([1, 2, 3, 4], 0.5, (1, 1, 1, 2.25), 0.75, unit="ms"),
        Costs(backward=2, overlap="max"),
        Costs(overlap=2.5),
        Costs(recompute=1),
        Costs(backward=[2, 3, 2, 3]),
        Costs(latency=1, bandwidth=0.5),
        Costs(overlap={(0, 1): 1}),
        Costs(overhead=0.25, overlap=3),
        Costs([1, 2, 3, 4], overhead=[0.5, 0, 0.25, 1]),
        Costs([[1, 2, 1, 3]] * 4, overhead=0.5),
    ],
)
def test_a_page_of_a_schedule_simulates_it_under_its_costs(evaluate: Evaluate, costs: Costs) -> None:
    """By the page's fields, and where these can't say the costs, as a timeline that stays as it is."""
    schedule = pplab.build("DualPipeV", num_ranks=2, num_microbatches=4)
    page = lab.explore(schedule, costs=costs)
    (state,) = re.findall(r'data-state="(.*?)"', page.page)
    (given,) = re.findall(r'class="pplab-given">(.*?)</script>', page.page)
    shown = (
        f"pplabSettings.ownTimelines(pplabSettings.decode({json.dumps(unescape(state))}), pplabRows.records({given}))"
    )
    assert evaluate(f"reportOf({shown}.timelines[0])") == expected_of(simulate(schedule, costs))
    assert evaluate(f"{shown}.timelines[0].unit || ''") == costs.unit
    assert ("spans" in given) == (page.fragment == "")
    if page.fragment:
        state = f"pplabSettings.decode({json.dumps(page.link('explorer.html').partition('#')[2])})"
        assert evaluate(f"reportOf(pplabSettings.ownTimelines({state}, []).timelines[0])") == expected_of(
            simulate(schedule, costs)
        )
    else:
        with pytest.raises(ValueError, match="no address shows this: one holds a single schedule, and costs that"):
            page.link("explorer.html")


def test_a_cost_without_a_field_is_drawn_and_not_dropped() -> None:
    """Such as one on messages that Costs hasn't got yet."""
    tolled = type("Tolled", (Costs,), {"toll": 0, "__annotations__": {"toll": float}})
    page = lab.explore(
        pplab.build("GPipe", num_ranks=2, num_microbatches=2), costs=dataclass(frozen=True)(tolled)(toll=1)
    )
    assert page.fragment == "" and '"spans"' in page.page


def test_what_is_too_long_for_an_address_says_so() -> None:
    page = lab.explore(pplab.build("1F1B", num_ranks=16, num_microbatches=128))
    with pytest.raises(ValueError, match=r"it takes \d{5} characters, and 8000 are .*; send the file that lab.explore"):
        page.link("explorer.html")
    several = lab.explore([pplab.build("1F1B", num_ranks=2, num_microbatches=2)] * 2)
    with pytest.raises(ValueError, match="one holds a single schedule"):
        several.link("explorer.html")


def test_what_cannot_be_explored(tmp_path) -> None:
    schedule = pplab.build("1F1B", num_ranks=2, num_microbatches=2)
    for thing in (3, "1F1B", [], [schedule, None], None):
        with pytest.raises(ValueError, match="explore takes a Schedule, a Timeline, a Run or a list of them, got "):
            lab.explore(thing)
    with pytest.raises(ValueError, match="forward has 3 values for 2 stages"):
        lab.explore(schedule, costs=Costs([1, 2, 3]))
    with pytest.raises(ValueError, match="costs must be a Costs"):
        lab.explore(schedule, costs=3)
    with pytest.raises(FileNotFoundError, match="nowhere"):
        lab.explore(schedule, tmp_path / "nowhere" / "page.html")
    named = lab.explore(Schedule(schedule.rows, "</script><b>")).page
    assert "</script><b>" not in named and r"\u003c/script>\u003cb>" in named


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


def test_a_browser_says_the_same() -> None:
    rng = random.Random(5)
    with browser.launched_or_skipped() as chromium:
        page = chromium.new_page()
        # Indirect eval, so that a script's functions become globals.
        evaluate = loaded(lambda code: page.evaluate("code => (0, eval)(code)", code))
        made = evaluate("Object.keys(pplab.builders)")
        sizes = [(2, 4), (3, 3), (2, 5)]
        agree(evaluate, [configuration(name, P, M, None, random_costs(rng)) for name in made for P, M in sizes])
