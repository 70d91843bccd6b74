"""Write src/pplab/lab/models/sample: made-up reviews with labels 0 to 4. Seeded: the same files every time."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

OUT = Path(__file__).parents[1] / "src" / "pplab" / "lab" / "models" / "sample"
SEED = 2026
SIZES = {"train": 1200, "test": 200}

PLACES = [
    "the bakery",
    "this noodle bar",
    "the barber shop",
    "their garage",
    "the hotel by the station",
    "the book store",
    "this coffee place",
    "the dentist",
    "the garden centre",
    "the climbing hall",
    "this taco stand",
    "the bike shop",
]
TIMES = [
    "last Tuesday",
    "on a rainy Sunday",
    "for the third time this year",
    "with my sister",
    "after work",
    "with two small children",
    "for a birthday",
    "at noon",
    "an hour before closing",
    "on the way to the airport",
]
THINGS = [
    "the service",
    "the price",
    "the waiting time",
    "the staff",
    "the food",
    "the noise",
    "the parking",
    "the soup",
    "the repair",
    "the room",
    "the counter",
    "the menu",
    "the tools",
    "the bread",
    "the view",
    "the bill",
]
SAYINGS = [
    [
        "was a disgrace",
        "made me walk out",
        "ruined the day",
        "was the worst I have seen",
        "is beyond repair",
        "cost twice what they had said",
        "was cold, late and wrong",
        "would make me warn my friends",
    ],
    [
        "was disappointing",
        "left a lot to be desired",
        "was slow and careless",
        "has gone downhill",
        "was not worth the trip",
        "could have been so much better",
        "was barely acceptable",
        "left me annoyed",
    ],
    [
        "was all right",
        "was neither good nor bad",
        "did the job",
        "was what one expects",
        "was fine for once",
        "had its ups and downs",
        "was average",
        "will not stay in my memory",
    ],
    [
        "was good",
        "was better than I had hoped",
        "was friendly and quick",
        "left me content",
        "is worth coming back for",
        "was fresh and fair",
        "made up for the weather",
        "was very decent",
    ],
    [
        "was wonderful",
        "could not have been better",
        "made my week",
        "was perfect down to the last detail",
        "deserves every star",
        "was the best in town",
        "left us smiling",
        "was outstanding",
    ],
]
ENDS = [
    ["Never again.", "Stay away.", "I want my money back.", "Zero stars if I could."],
    ["I doubt that I will return.", "There are better choices nearby.", "Not for me.", "They can do better."],
    ["I may come back, or not.", "It depends on the day.", "Make of that what you like.", "Three stars it is."],
    ["I will come back.", "Recommended with small reservations.", "Give them a try.", "A solid choice."],
    ["Go there now!", "I tell everybody about it.", "Five stars are not enough.", "We will be back next week!"],
]


def review(label: int, rng: random.Random) -> str:
    """One review of two to nine sentences whose tone fits the label, with now and then a sentence from next door."""
    sentences = [f"I went to {rng.choice(PLACES)} {rng.choice(TIMES)}."]
    for _ in range(rng.randint(1, 7)):
        mood = label if rng.random() < 0.85 else min(max(label + rng.choice([-1, 1]), 0), 4)
        thing = rng.choice(THINGS)
        sentences.append(f"{thing.capitalize()} {rng.choice(SAYINGS[mood])}.")
    sentences.append(rng.choice(ENDS[label]))
    return " ".join(sentences)


def rows(size: int, rng: random.Random) -> tuple[list[int], list[str]]:
    """Labels and texts of a split."""
    labels = [rng.randrange(5) for _ in range(size)]
    return labels, [review(label, rng) for label in labels]


def main() -> None:
    """Write the files."""
    rng = random.Random(SEED)
    OUT.mkdir(parents=True, exist_ok=True)
    for split, size in SIZES.items():
        text = "\n".join(json.dumps(row) for row in zip(*rows(size, rng), strict=True))
        (OUT / f"{split}.json.gz").write_bytes(gzip.compress(text.encode(), mtime=0))


if __name__ == "__main__":
    main()
