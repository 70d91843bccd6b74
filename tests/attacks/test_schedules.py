"""Mutated schedules against an oracle that owes nothing to the package but the fields of an action."""

from __future__ import annotations

import random
import time
from collections import defaultdict
from itertools import pairwise

import pplab as pp
from conftest import is_ready
from pplab import Action, Kind, Overlap, Schedule, ScheduleError, lab

F, B, I, W = Kind.F, Kind.B, Kind.I, Kind.W  # noqa: E741
Rows = list[list[Action | Overlap]]

SLOWEST_S = 10  # of a verdict on a few hundred actions, which takes milliseconds: a machine may be busy


def halves(item: Action | Overlap) -> tuple:
    return (item,) if type(item) is Action else tuple(item)


def fault(rows: Rows) -> str:
    """A word for the first rule that the rows break; none for a legal schedule."""
    plain = [[[(a.stage, a.kind.value, a.microbatch) for a in halves(x)] for x in row] for row in rows]
    flat = [(rank, *a) for rank, row in enumerate(plain) for x in row for a in x]
    if not all(plain):
        return "an empty row"
    for x in (x for row in plain for x in row):
        if any(kind not in "FBIW" for _, kind, _ in x):
            return "communication"
        if len(x) == 2 and x[0][::2] == x[1][::2]:
            return "an overlap of a stage's work on a microbatch"
    S, M = 1 + max(stage for _, stage, _, _ in flat), 1 + max(m for *_, m in flat)
    of = defaultdict(list)
    for rank, stage, kind, m in flat:
        of[stage, m].append((kind, rank))
    for found in (of[stage, m] for stage in range(S) for m in range(M)):
        if sorted(kind for kind, _ in found) not in (["B", "F"], ["F", "I", "W"]):
            return "work that is not there once"
        if len({rank for _, rank in found}) > 1:
            return "a microbatch of a stage on two ranks"
    return misplaced(len(plain), S, flat) or stuck(plain, S)


def misplaced(P: int, S: int, flat: list) -> str:
    """Every stage is on one rank, or on two mirrored ones, of those that share microbatches."""
    where = [sorted({rank for rank, stage, _, _ in flat if stage == s}) for s in range(S)]
    group = list(range(P))
    for m in {m for *_, m in flat}:
        joined = {group[rank] for rank, _, _, n in flat if n == m}
        group = [min(joined) if g in joined else g for g in group]
    for ranks in ([rank for rank in range(P) if group[rank] == g] for g in set(group)):
        places = [[ranks.index(rank) for rank in place if rank in ranks] for place in where]
        once = all(len(place) == 1 for place in places)
        mirrored = all(len(place) == 2 and sum(place) == len(ranks) - 1 for place in places)
        if not (all(len(place) == 1 for place in where) or once or mirrored):
            return "a stage on ranks that may not share it"
    return ""


def stuck(plain: list, S: int) -> str:
    done, at, moved = set(), [0] * len(plain), True
    while moved:
        moved = False
        for rank, row in enumerate(plain):
            while at[rank] < len(row) and all(is_ready(a, done, S) for a in row[at[rank]]):
                done.update(row[at[rank]])
                at[rank] += 1
                moved = True
    return "" if all(i == len(row) for i, row in zip(at, plain, strict=True)) else "an order that can't run"


def shifted(item: Action | Overlap, by: int) -> Action | Overlap:
    if type(item) is Overlap:
        return Overlap(shifted(item.first, by), shifted(item.second, by))
    return item._replace(microbatch=item.microbatch + by)


def change(item: Action | Overlap, draw: random.Random, **values: object) -> Action | Overlap:
    """The item, or a half of it, with another field."""
    if type(item) is Action:
        return item._replace(**values)
    half = draw.choice(("first", "second"))
    return item._replace(**{half: getattr(item, half)._replace(**values)})


MUTATIONS = (
    *("drop", "double", "swap", "move", "rank", "kind", "restage", "renumber", "far", "overlap", "same overlap"),
    *("any overlap", "apart", "split", "halve", "empty", "one more", "copy", "replicas", "communicate", "rotate"),
    *("reverse", "exchange", "insert", "home"),
)


def mutated(rows: Rows, what: str, draw: random.Random) -> Rows:
    """The rows with one thing changed."""
    rows, P = [list(row) for row in rows], len(rows)
    everything = [a for row in rows for x in row for a in halves(x)]
    S, M = 1 + max(a.stage for a in everything), 1 + max(a.microbatch for a in everything)
    r = draw.choice([rank for rank in range(P) if rows[rank]])
    row, other = rows[r], draw.choice(rows)
    i, j = draw.randrange(len(row)), draw.randrange(len(row))
    any_action = Action(draw.randrange(S), draw.choice((F, B, I, W)), draw.randrange(M))
    if what == "drop":
        del row[i]
    elif what == "double":
        row.insert(j, row[i])
    elif what == "swap":
        row[i], row[j] = row[j], row[i]
    elif what == "move":
        row.insert(j, row.pop(i))
    elif what == "rank":
        other.insert(draw.randrange(len(other) + 1), row.pop(i))
    elif what in ("kind", "restage", "renumber", "far"):
        near = {"kind": any_action.kind, "stage": draw.randrange(S + 1), "microbatch": draw.randrange(M + 1)}
        far = draw.choice(({"stage": 10 ** draw.randrange(1, 40)}, {"microbatch": 10 ** draw.randrange(1, 40)}))
        field = {"kind": "kind", "restage": "stage", "renumber": "microbatch"}.get(what)
        row[i] = change(row[i], draw, **({field: near[field]} if field else far))
    elif what in ("overlap", "same overlap", "any overlap") and i != j:
        joined = [x for x in (row[i], row[j]) if type(x) is Action]
        if what != "any overlap":
            fs, bs = ([x for x in row if type(x) is Action and x.kind is kind] for kind in (F, B))
            pairs = [(f, b) for f in fs for b in bs if what == "overlap" or f.microbatch == b.microbatch]
            joined = draw.choice(pairs) if pairs else ()
        if len(joined) == 2:
            row[row.index(joined[0])] = Overlap(*joined)
            row.remove(joined[1])
    elif what == "apart" and type(row[i]) is Overlap:
        row[i : i + 1] = draw.sample(halves(row[i]), 2)
    elif what in ("split", "halve") and type(row[i]) is Action and row[i].kind is B:
        weights = row[i]._replace(kind=W)
        if what == "split":
            row[i] = row[i]._replace(kind=I)
        row.insert(draw.randrange(0 if draw.random() < 0.3 else i, len(row)) + 1, weights)
    elif what == "empty":
        rows.insert(draw.randrange(P + 1), [])
    elif what == "one more":
        rows.append([any_action])
    elif what == "copy":
        rows.append(list(row))
    elif what == "replicas":
        rows = [[shifted(x, d * M) for x in row] for d in range(draw.choice((2, 3))) for row in rows]
        if draw.random() < 0.3:
            draw.shuffle(rows)
    elif what == "communicate":
        row.insert(i, any_action._replace(kind=draw.choice(list(Kind)[4:])))
    elif what == "rotate":
        rows[r] = row[i:] + row[:i]
    elif what == "reverse":
        row[min(i, j) : max(i, j)] = row[min(i, j) : max(i, j)][::-1]
    elif what == "exchange":
        rows[r], rows[-1] = rows[-1], rows[r]
    elif what == "insert":
        row.insert(i, any_action)
    elif what == "home":  # all that a stage does for a microbatch, to another rank
        place = any_action[::2]
        gone = [x for row in rows for x in row if type(x) is Action and x[::2] == place]
        rows = [[x for x in row if x not in gone] for row in rows]
        rows[draw.randrange(P)] += gone
    return rows


def bases() -> list[Rows]:
    found = []
    for builder in pp.builders.known():
        for P, M in ((1, 1), (1, 3), (2, 2), (2, 8), (3, 6), (4, 8), (4, 12), (6, 12)):
            if "limit" in builder.options and P * M > 16:
                continue  # a search takes a second
            try:
                found.append(builder(P, M).rows)
            except ValueError:
                continue  # it doesn't take these sizes
    return found


def judged(rows: Rows, expected: str, draw: random.Random) -> tuple[str, str]:
    """What is wrong with what the package says of the rows, if anything; and what it says."""
    verdicts = []
    for costs in (None, pp.Costs(latency=1), pp.Costs(bandwidth=2)):
        try:
            schedule = Schedule(rows)
            if costs is None:
                pp.validate(schedule)
            else:
                pp.simulate(schedule, costs)
            verdicts.append("")
        except ValueError as error:
            verdicts.append(str(error))
            located = isinstance(error, ScheduleError) and error.cause and error.remedy
            if not located and "is not an overlap: expected" not in str(error):
                return "no cause or remedy", str(error)
            if located and (str(error.rank or "") not in str(error) or str(error.action or "") not in str(error)):
                return "names another place", str(error)
        except Exception as error:
            return "raw exception", repr(error)
    if len(set(verdicts)) > 1:
        return "validate and simulate differ", str(verdicts)
    if bool(verdicts[0]) != bool(expected):
        return "false alarm" if verdicts[0] else "accepted", verdicts[0]
    if not expected and draw.random() < 0.1 and lab.read_csv(lab.to_csv(schedule)) != schedule:
        return "its CSV is another schedule", ""
    return "", verdicts[0]


def attack(tries: int, seed: int) -> list[dict]:
    """Judge mutated schedules: a row for each rule that they break, and one for the legal ones."""
    draw, from_which = random.Random(seed), bases()
    rows_of: dict[str, dict] = {}
    for _ in range(tries):
        rows, done = draw.choice(from_which), []
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            if any(rows):
                done.append(draw.choice(MUTATIONS))
                rows = mutated(rows, done[-1], draw)
        if not any(rows):
            continue
        far = any(max(a.stage, a.microbatch) > 1000 for row in rows for x in row for a in halves(x))
        expected = "numbers far beyond the actions" if far else fault(rows)
        began = time.perf_counter()
        wrong, said = judged(rows, expected, draw)
        took = time.perf_counter() - began
        found = rows_of.setdefault(expected, dict(what=expected or "no fault", tried=0, wrong=0, seen="", seconds=0))
        found["tried"] += 1
        found["seconds"] = round(max(found["seconds"], took), 3)
        found["seen"] = found["seen"] or (said if expected else "it is taken")
        if wrong or took > SLOWEST_S:
            found["wrong"] += 1
            found["seen"] = f"{wrong or 'slow'} after {', '.join(done)}: {said}"
    return [rows_of[key] for key in sorted(rows_of)]


def test_mutated_schedules_are_judged_as_the_oracle_judges_them():
    found = attack(800, seed=1)
    assert [row for row in found if row["wrong"]] == []
    assert len(found) >= 9 and all(row["seen"] for row in found)


def test_the_oracle_knows_the_rules():
    """One schedule for each word that it has."""
    words = {
        "0F0 0B0 / 1F0 1B0": "",
        "0F0 0I0 0W0": "",
        "0F0 0B0 / ": "an empty row",
        "0F0 0SEND_F0 0B0": "communication",
        "0F0 0F1 0B0": "work that is not there once",
        "0F0 / 0B0": "a microbatch of a stage on two ranks",
        "0F0 1F0 1B0 0B0 1F1 1B1 / 0F1 0B1": "a stage on ranks that may not share it",
        "0B0 0F0": "an order that can't run",
        "1F0 1B0 / 0B0 0F0": "an order that can't run",
        "(0F0;1F0)OVERLAP_F_F 1B0 0B0": "an order that can't run",
    }
    for text, word in words.items():
        rows = [[pp.parse(x) for x in row.split()] for row in text.split("/")]
        assert fault(rows) == word, text
    pair = Overlap(pp.parse("0F0"), pp.parse("0B0"))
    assert fault([[pair]]) == "an overlap of a stage's work on a microbatch"


def test_every_mutation_changes_something():
    draw = random.Random(3)
    rows = [*map(list, pp.build("DualPipeV", num_ranks=2, num_microbatches=6).rows)]
    for what in MUTATIONS:
        tries = [mutated(rows, what, draw) for _ in range(40)]
        assert any(made != rows for made in tries), what
    assert all(a != b for a, b in pairwise(sorted(MUTATIONS)))
