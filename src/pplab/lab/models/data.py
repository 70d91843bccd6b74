"""Reviews with one to five stars: the hub's Yelp data set, or a sample that comes with pplab.

`tools/make_sample.py` made the sample, and no line of it is a real review. `Reviews.source` tells
which one was used.
"""

from __future__ import annotations

import gzip
import json
import sys
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from itertools import islice
from pathlib import Path
from threading import Thread

from ...errors import positive_int
from ...optional import bring

DATASET = "Yelp/yelp_review_full"
SAMPLE = Path(__file__).parent / "sample"
REVISION = "c1f9ee939b7d05667af864ee1cb066393154bf85"  # of 2024: what is fetched is always the same
_PROBE_S = 1.0

# tqdm, which the hub's packages import, would warn in red that it finds no ipywidgets
if "ipykernel" in sys.modules:
    with suppress(ModuleNotFoundError), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="IProgress not found")
        bring("tqdm.auto")


@dataclass(frozen=True)
class Reviews:
    """Texts with labels 0 to 4 (one to five stars), and where they came from."""

    texts: tuple[str, ...]
    labels: tuple[int, ...]
    source: str

    def __repr__(self) -> str:
        return f"<{len(self.texts)} reviews from {self.source}>"


@cache
def reviews(split: str = "train", *, source: str = "auto", limit: int = 512) -> Reviews:
    """The first `limit` reviews of a split ("train" or "test").

    `source` is one of these:

    - "hub" loads the Yelp data set with `datasets` (ConnectionError where it can't be reached),
    - "sample" takes the bundled sample,
    - "auto" takes the hub where it can be reached and the sample elsewhere,
    - a folder that `datasets.load_dataset` can read, such as a copy of the hub's, with `text` and
      `label` in its rows.

    >>> reviews("test", source="sample", limit=3)
    <3 reviews from pplab's sample>
    """
    if split not in ("train", "test"):
        raise ValueError(f'unknown split {split!r}: expected "train" or "test"')
    positive_int("limit", limit)
    if Path(source).is_dir():
        return _take(
            bring("datasets").load_dataset(source, split=split, streaming=True), limit, source
        )
    if source not in ("auto", "hub", "sample"):
        raise ValueError(
            f'unknown source {source!r}: expected "auto", "hub", "sample", or a folder that is '
            "there"
        )
    reason = ""
    if source != "sample":
        try:
            return _from_hub(split, limit)
        except (
            OSError
        ) as error:  # datasets raises ConnectionError and FileNotFoundError, both of this kind
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            if source == "hub":
                raise ConnectionError(
                    f"the hub's {DATASET} can't be reached ({reason}): check the network, "
                    'or use source="sample" or "auto"'
                ) from error
    found = "pplab's sample" + (f" (the hub's {DATASET} can't be reached)" if reason else "")
    with gzip.open(SAMPLE / f"{split}.json.gz", "rt") as lines:  # which takes nothing but Python
        return _take(
            (dict(zip(("label", "text"), json.loads(line), strict=True)) for line in lines),
            limit,
            found,
        )


def hub_is_reachable() -> bool:
    """Whether the hub answers within a second, through a proxy if there is one. The hub's own
    client would retry for half a minute, and looking up a name can hang for as long. So a thread
    asks, and nobody waits for it after that second.
    """
    constants = bring("huggingface_hub.constants")
    from huggingface_hub.utils import get_session

    if constants.HF_HUB_OFFLINE:
        return False
    answers: list[object] = []

    def ask() -> None:
        with suppress(Exception):  # whatever it is, the hub hasn't answered
            answers.append(get_session().head(constants.ENDPOINT, timeout=_PROBE_S))

    asking = Thread(target=ask, daemon=True)
    asking.start()
    asking.join(_PROBE_S)
    return bool(answers)


def _from_hub(split: str, limit: int) -> Reviews:
    """Stream what is needed instead of fetching 323 MB. Offline, take what an earlier download left
    in the cache.
    """
    load_dataset = bring("datasets").load_dataset
    from huggingface_hub import constants

    if constants.HF_HUB_OFFLINE:
        return _take(
            load_dataset(DATASET, revision=REVISION, split=split),
            limit,
            f"the hub's {DATASET} (cached)",
        )
    if not hub_is_reachable():
        raise ConnectionError(f"{constants.ENDPOINT} doesn't answer")
    return _take(
        load_dataset(DATASET, revision=REVISION, split=split, streaming=True),
        limit,
        f"the hub's {DATASET}",
    )


def _take(rows: Iterable[Mapping], limit: int, source: str) -> Reviews:
    taken = list(islice(rows, limit))
    return Reviews(
        tuple(row["text"] for row in taken), tuple(row["label"] for row in taken), source
    )
