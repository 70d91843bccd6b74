"""Who waits for whom in a job that hangs: the last messages of every rank, and the schedule that they belong to.

NCCL's flight recorder dumps them, as pickles or as JSON. Between two ranks messages arrive in the order of sending, so
the k-th send of one rank to another is the k-th message that the schedule has there.
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, NoReturn

from ...schedule import Schedule
from ..forms import reading

_MESSAGE = re.compile(r"nccl:(send|recv) (\d+)(?:->|<-)(\d+)")
Posted = Mapping[tuple[str, int], Sequence[bool]]  # of a rank, by way and peer in its pipeline: whether each has ended


class _Plain(pickle.Unpickler):
    """Reads a pickle of plain values, and refuses whatever would import or call something."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise ValueError(f"the pickle asks for {module}.{name}, and a flight recorder's has plain values alone")


def explain_hang(schedule: Schedule, *places: str | Path) -> str:
    """Say for which message each rank of a job waits that hangs, and what those do that wait for none.

    `places` are the dumps of NCCL's flight recorder, one per rank and named by it, or their folder; `schedule` is what
    ran. ValueError for other files, and for dumps that have lost their first messages.
    """
    dumps: dict[int, Posted] = {}
    pipelines = set()
    for file in chain(*(each.iterdir() if each.is_dir() else [each] for each in map(Path, places))):
        with reading(str(file), "a dump of NCCL's flight recorder that has all messages (TORCH_FR_BUFFER_SIZE)"):
            raw = file.read_bytes()
            rank = int(re.findall(r"\d+", file.name)[-1])
            ranks, dumps[rank] = _posted(json.loads(raw) if raw.startswith(b"{") else _Plain(io.BytesIO(raw)).load())
        pipelines.add(ranks)
    pipelines = {ranks for ranks in pipelines if len(ranks) == schedule.num_ranks}
    if not pipelines:
        raise ValueError(f"no dump has messages among {schedule.num_ranks} ranks: {schedule.name} isn't what ran")
    return "\n".join(chain(*(_told(schedule, ranks, dumps) for ranks in sorted(pipelines))))


def _posted(data: Any) -> tuple[tuple[int, ...], Posted]:
    """The ranks of a dump's pipeline, and the messages. Of a batch's, only the batch's own entry tells a state."""
    posted, ranks = defaultdict(list), []
    ended = {e["p2p_seq_id"]: e["state"] for e in data["entries"] if e["profiling_name"] == "nccl:coalesced"}
    if lost := min((entry["record_id"] for entry in data["entries"]), default=0):
        raise ValueError(f"the first {lost} messages are lost")
    for entry in data["entries"]:
        if match := _MESSAGE.match(entry["profiling_name"]):
            posted[match[1], int(match[3])].append(ended.get(entry["p2p_seq_id"], entry["state"]) == "completed")
            ranks = json.loads(data["pg_config"][entry["process_group"][0]]["ranks"])
    return tuple(ranks), posted


def _told(schedule: Schedule, ranks: Sequence[int], dumps: Mapping[int, Posted]) -> Iterator[str]:
    """A line for each rank of a pipeline."""
    graph, columns, items = schedule.graph, schedule.columns, [*chain(*schedule.rows)]
    between = defaultdict(list)  # of a sender and a receiver: what makes and what uses a message
    for user in range(len(items)):
        for _, entry in graph.awaited(user):
            maker = graph.id_of(entry)
            between[columns.ranks[maker], columns.ranks[user]].append((maker, user))
    makers = {maker for (source, target), found in between.items() if source != target for maker, _ in found}
    for place, rank in enumerate(ranks):
        if rank not in dumps:
            yield f"rank {rank}: no dump, so it may be the one that hangs"
            continue
        row, first, at, waiting = schedule.rows[place], columns.bounds[place], 0, []
        for (way, peer), ended in dumps[rank].items():
            messages = sorted(between[(place, peer) if way == "send" else (peer, place)])
            met = len(dumps.get(ranks[peer], {}).get(("recv" if way == "send" else "send", place), ()))
            for k, done in enumerate(ended):
                step, (maker, user) = k // len(messages), messages[k % len(messages)]
                if done or way == "send":
                    at = max(at, step * len(row) + (maker + 1 if way == "send" else user) - first)
                if not done:
                    waiting.append((way, step, user, maker, ranks[peer], k < met))
        until = next((i for i in range(at, at + len(row)) if first + i % len(row) in makers), at)
        what = f"is in {' or '.join(str(row[i % len(row)]) for i in range(at, until + 1))}"
        if waiting:
            way, _, user, maker, peer, both = min(waiting)
            if way == "recv":
                what = f"waits in {items[user]} for what {items[maker]} gives, which rank {peer} "
                what += "has sent, so look at their link" if both else "hasn't sent"
            else:
                what += f", and rank {peer} hasn't taken what {items[maker]} gives"
        yield f"rank {rank} {what}"
