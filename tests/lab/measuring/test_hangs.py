"""Dumps of flight recorders: who waits for whom, and pickles that would run something."""

from __future__ import annotations

import json
import os
import pickle
import re
from itertools import chain, pairwise, product
from pathlib import Path
from typing import Any

import pytest

import pplab as pp
from pplab import lab
from pplab.__main__ import main
from pplab.actions import parts

RAN = pp.build("1F1B", num_ranks=4, num_microbatches=6)


def save(
    folder: Path,
    posted: list[list[tuple[str, int, Any]]],
    ranks: list[int],
    as_pickle: bool = False,
    told: pp.Schedule | None = None,
) -> Path:
    """A dump for each rank of a pipeline, of (way, peer, ended or a state): in the form of torch 2.13's recorder.

    `told`: with the mode and the shapes that torch's stages tell their neighbours first, in three messages.
    """
    folder.mkdir(exist_ok=True)
    first: list[list[tuple[str, int, bool]]] = [[] for _ in ranks]
    for a, b in pairwise(told.placement if told else ()):
        for source, target in ((a, b), (b, a)) if a != b else ():
            first[source] += 3 * [("send", target, True)]
            first[target] += 3 * [("recv", source, True)]
    for place, rank in enumerate(ranks):
        entries = [
            {
                "record_id": number,
                "process_group": ["7", "pp"],
                "p2p_seq_id": number + 1,
                "op_id": number + 1,
                "collective_seq_id": 0,
                "is_p2p": True,
                "profiling_name": f"nccl:{way} {place}{'->' if way == 'send' else '<-'}{peer}",
                "input_dtypes": ["Float" if number >= len(first[place]) else "Long"],
                "state": ended if isinstance(ended, str) else "completed" if ended else "started",
            }
            for number, (way, peer, ended) in enumerate(first[place] + posted[place])
        ]
        dump = {"entries": entries, "pg_config": {"7": {"desc": "pp", "ranks": json.dumps(ranks)}}}
        (folder / f"rank_{rank}").write_bytes(pickle.dumps(dump) if as_pickle else json.dumps(dump).encode())
    return folder


def hung(schedule: pp.Schedule, stuck: str, steps: int = 2) -> list[list[tuple[str, int, bool]]]:
    """What each rank has posted when one action never ends: receives when they are needed, sends when they are made."""
    graph, ranks, items = schedule.graph, schedule.columns.ranks, [*map(str, chain(*schedule.rows))]
    makers = [[graph.id_of(entry) for _, entry in graph.awaited(i)] for i in range(len(items))]
    users = [[user for user in range(len(items)) if i in makers[user]] for i in range(len(items))]
    never = {items.index(stuck)}  # with all that waits for it
    for _ in items:
        later = {i + 1 for i in never if i + 1 < len(items) and ranks[i + 1] == ranks[i]}
        never |= later | {i for i in range(len(items)) if never.intersection(makers[i])}
    posted: list[list[tuple[str, int, bool]]] = [[] for _ in schedule.rows]
    for step, i in product(range(steps), range(len(items))):
        rank, hangs = ranks[i], step == steps - 1 and i in never
        if hangs and i - 1 in never and ranks[i - 1] == rank:
            continue  # the rank isn't there yet
        posted[rank] += [("recv", ranks[m], not (hangs and m in never)) for m in makers[i] if ranks[m] != rank]
        posted[rank] += [("send", ranks[user], True) for user in users[i] if ranks[user] != rank and not hangs]
    return posted


TOLD = """\
rank 1 waits in 0B2 for what 1B2 gives, which rank 3 hasn't sent
rank 3 waits in 1B2 for what 2B2 gives, which rank 5 hasn't sent
rank 5 is in 2F3
rank 7 waits in 3F3 for what 2F3 gives, which rank 5 hasn't sent"""


@pytest.mark.parametrize("as_pickle", [False, True])
def test_who_holds_up_all_is_named_by_the_jobs_ranks(tmp_path, capsys, as_pickle):
    dumps = save(tmp_path / "dumps", hung(RAN, "2F3"), [1, 3, 5, 7], as_pickle)
    assert lab.explain_hang(RAN, dumps) == TOLD
    assert main(["explain", str(dumps), "--schedule", "1F1B", "--ranks", "4", "--microbatches", "6"]) == 0
    assert capsys.readouterr().out == TOLD + "\n"
    (dumps / "rank_5").unlink()
    told = lab.explain_hang(RAN, dumps)
    assert "rank 5: no dump, so it may be the one that hangs" in told
    assert "rank 7 waits in 3F3 for what 2F3 gives, which rank 5 may have sent" in told


@pytest.mark.parametrize("name", ["GPipe", "ZB-H1", "Interleaved1F1B"])
def test_every_action_that_never_ends_is_found(tmp_path, name):
    schedule = pp.build(name, num_ranks=3, num_microbatches=6)
    for rank, row in enumerate(schedule.rows):
        for item in row[:-1:5]:
            dumps = save(tmp_path / str(item), hung(schedule, str(item)), [0, 1, 2])
            told = lab.explain_hang(schedule, dumps)
            here = next(line for line in told.splitlines() if line.startswith(f"rank {rank} "))
            assert " is in " in here and str(item) in here, (item, told)


def test_two_that_send_first_and_a_link_that_has_stopped(tmp_path):
    two = pp.build("1F1B", num_ranks=2, num_microbatches=4)
    first = [[("send", 1, True), ("send", 1, False)], [("recv", 0, True), ("send", 0, False)]]
    told = lab.explain_hang(two, save(tmp_path / "circle", first, [0, 1]))
    assert told.splitlines() == [
        "rank 0 is in 0B0 or 0F2, and rank 1 hasn't taken what 0F1 gives",
        "rank 1 is in 1F1 or 1B1, and rank 0 hasn't taken what 1B0 gives",
    ]
    stopped = [[("send", 1, False)], [("recv", 0, False)]]
    told = lab.explain_hang(two, save(tmp_path / "link", stopped, [0, 1]))
    assert "rank 1 waits in 1F0 for what 0F0 gives, which rank 0 has sent, so look at their link" in told


def test_what_a_host_posts_ahead_of_its_gpu_isnt_sent(tmp_path):
    two, late = pp.build("1F1B", num_ranks=2, num_microbatches=4), "scheduled"
    ahead = [[("send", 1, late), ("send", 1, late), ("recv", 1, late)], [("recv", 0, late), ("send", 0, late)]]
    assert lab.explain_hang(two, save(tmp_path / "ahead", ahead, [0, 1])).splitlines() == [
        "rank 0 is in 0F0, or rank 1 hasn't taken what 0F0 gives",
        "rank 1 waits in 1F0 for what 0F0 gives, which rank 0 may have sent",
    ]


def test_messages_of_a_batch_end_with_it(tmp_path):
    """Only the batch's own entry tells a state then."""
    dumps = save(tmp_path / "dumps", hung(RAN, "2F3"), [0, 1, 2, 3])
    for path in dumps.iterdir():
        data, entries = json.loads(path.read_text()), []
        for entry in data["entries"]:
            batch = {**entry, "profiling_name": "nccl:coalesced"}
            entries += [{**entry, "state": "scheduled"}, batch]
        path.write_text(json.dumps({**data, "entries": entries}))
    assert "rank 2 is in 2F3" in lab.explain_hang(RAN, dumps)


def cut(dumps: Path, last: int) -> Path:
    """The same dumps of recorders that keep so many operations."""
    for path in dumps.iterdir():
        data = json.loads(path.read_text())
        path.write_text(json.dumps({**data, "entries": data["entries"][-last:]}))
    return dumps


@pytest.mark.parametrize("name", ["1F1B", "GPipe", "ZB-H1", "Interleaved1F1B"])
def test_recorders_that_have_lost_their_first_messages(tmp_path, name):
    """What is told of the last messages is what all of them told, or that they don't tell."""
    schedule = pp.build(name, num_ranks=3, num_microbatches=6)
    decided = {last: 0 for last in (6, 24, 96)}
    for last, (rank, row) in product(decided, enumerate(schedule.rows)):
        dumps = save(tmp_path / f"{last}-{rank}", hung(schedule, str(row[len(row) // 2]), steps=5), [0, 1, 2])
        truth = lab.explain_hang(schedule, dumps).splitlines()
        *told, lost = lab.explain_hang(schedule, cut(dumps, last)).splitlines()
        assert re.fullmatch("The dumps have lost the first .* messages of each rank, .* to have arrived.", lost)
        for true, said in zip(truth, told, strict=True):
            decided[last] += said == true
            unsure = true.replace("hasn't sent", "may have sent")
            assert said in (true, unsure) or "set TORCH_FR_BUFFER_SIZE" in said, (last, true, said)
    assert decided[6] < 9 == decided[96]  # three lines, of three jobs


def early(schedule: pp.Schedule, stuck: str, steps: int) -> tuple[list[list[tuple[str, int, bool]]], dict[int, str]]:
    """What ranks have posted that run torch's lowered rows, where receives stand early, and where each is then."""
    home, rows = schedule.placement, lab.lower_by_torch(schedule)
    sent, posted, at = set(), [[] for _ in rows], {rank: (0, 0) for rank in range(len(rows))}
    for _, rank in product(range(schedule.num_microbatches * steps * 40), at):
        step, place = at[rank]
        item = rows[rank][place]
        ways = [(str(a.kind), a.stage, a.microbatch, step) for a in parts(item)]
        needed = [("F" if k == "F" else "B", s, m, step) for k, s, m, _ in ways if k in "FBI"]
        sources = [(key, key[1] - 1 if key[0] == "F" else key[1] + 1) for key in needed]
        if step == steps - 1 and str(item) == stuck:
            continue
        if any(0 <= s < len(home) and home[s] != rank and key not in sent for key, s in sources):
            continue
        (kind, stage, m, _), *_ = ways
        if "_" in kind:  # a message: its key is of the action that needs it
            forward, sends = kind[-1] == "F", kind.startswith("SEND")
            peer = stage + (1 if forward == sends else -1)
            key = ("F" if forward else "B", peer if sends else stage, m, step)
            sent |= {key} if sends else set()
            posted[rank].append(("send" if sends else "recv", home[peer], sends or key))
        at[rank] = (step, place + 1) if place + 1 < len(rows[rank]) else (step + 1, 0)
    ended = [[(way, peer, key is True or key in sent) for way, peer, key in mine] for mine in posted]
    return ended, {rank: str(rows[rank][place]) for rank, (_, place) in at.items()}


@pytest.mark.parametrize("name", ["ZB-V", "DualPipeV", "V-Half", "Interleaved1F1B", "LoopedBFS"])
def test_early_receives_and_messages_about_shapes_certify_nothing_false(tmp_path, name):
    schedule = pp.build(name, num_ranks=3, num_microbatches=6)
    for rank, last in product(range(3), (None, 90)):
        posted, truth = early(schedule, str(schedule.rows[rank][-7]), steps=3)
        dumps = save(tmp_path / f"{rank}{last}", posted, [0, 1, 2], told=schedule)
        told = lab.explain_hang(schedule, cut(dumps, last) if last else dumps).splitlines()
        for place, line in enumerate(told[:3]):
            assert f" {truth[place]}" in line or (last and "set TORCH_FR_BUFFER_SIZE" in line), (truth, line)


class Runs:
    def __reduce__(self):
        return os.system, ("touch here",)


def test_a_pickle_runs_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rank_0").write_bytes(pickle.dumps({"entries": [], "pg_config": Runs()}))
    with pytest.raises(ValueError, match=r"rank_0 is damaged, or something else.*the pickle asks for posix.system"):
        lab.explain_hang(RAN, tmp_path / "rank_0")
    assert not (tmp_path / "here").exists()


def test_dumps_that_dont_tell(tmp_path):
    (tmp_path / "rank_9").write_text('{"entries": [], "pg_config": {}}')
    dumps = save(tmp_path / "dumps", hung(RAN, "2F3"), [0, 1, 2, 3])
    with pytest.raises(ValueError, match="no dump has messages among 2 ranks: 1F1B isn.t what ran"):
        lab.explain_hang(pp.build("1F1B", num_ranks=2, num_microbatches=6), dumps)
    text = (dumps / "rank_1").read_text()
    (dumps / "rank_1").write_text(re.sub(r'("record_id": )', r"\g<1>40", text.replace("op_id", "none")))
    with pytest.raises(
        ValueError,
        match="rank_1 doesn't tell where its rank is: the first 40+ operations are lost, .* set TORCH_FR_BUFFER_SIZE",
    ):
        lab.explain_hang(RAN, dumps)
    data = json.loads((dumps / "rank_1").read_text())
    data["entries"][-1] |= {"op_id": 60, "input_dtypes": ["Long"]}
    data["entries"][0]["op_id"] = 41
    (dumps / "rank_1").write_text(json.dumps(data))
    with pytest.raises(ValueError, match="rank_1 doesn't .* lost, and messages with shapes come between the others"):
        lab.explain_hang(RAN, dumps)
    data["entries"] = [each | {"profiling_name": "nccl:all_reduce"} for each in data["entries"]]
    (dumps / "rank_1").write_text(json.dumps(data))
    with pytest.raises(ValueError, match="rank_1 doesn't tell .*: none of its last operations is a message of a stage"):
        lab.explain_hang(RAN, dumps)
    gpipe = save(tmp_path / "gpipe", hung(pp.build("GPipe", num_ranks=4, num_microbatches=6), "2F3"), [0, 1, 2, 3])
    with pytest.raises(ValueError, match="the messages aren't in 1F1B's order: that isn't what ran"):
        lab.explain_hang(RAN, gpipe)
    with pytest.raises(ValueError, match="no dump of a flight recorder has a message"):
        lab.explain_hang(RAN, tmp_path / "rank_9")
    (gpipe / "rank_7").write_text((gpipe / "rank_1").read_text())  # named by its host, not by the job
    with pytest.raises(ValueError, match="a second dump of rank 1"):
        lab.explain_hang(RAN, gpipe)
    other = pp.build("Interleaved1F1B", num_ranks=4, num_microbatches=8)
    with pytest.raises(ValueError, match="rank 0 has messages with rank 3, and in 1F1B it has none: that isn't what"):
        lab.explain_hang(RAN, save(tmp_path / "loop", hung(other, "2F3"), [0, 1, 2, 3]))
