"""Pictures show the numbers that they are given, in words too, and a phone shows them whole."""

from __future__ import annotations

import random
import re
from itertools import combinations

import pytest

import pplab as pp
from pplab import lab, palette  # noqa: F401 (lab: its schedules)

pytest.importorskip("matplotlib").use("Agg")

from matplotlib import pyplot as plt  # noqa: E402
from matplotlib.colors import to_hex, to_rgba  # noqa: E402
from matplotlib.patches import Circle, FancyArrowPatch, Rectangle  # noqa: E402

from pplab_course import pictures  # noqa: E402
from pplab_course.figures import alternative_text, figure_html  # noqa: E402
from pplab_course.pictures import _canvas  # noqa: E402

STATE, SEQUENCE = [36.3, 27.9, 27.9, 36.3], [9.13] * 4
PHONE = 328  # pixels of a page's text on a phone of 360


def ridden(name: str, at: float, ranks: int = 4, microbatches: int = 16, **options):
    schedule = pp.build(name, num_ranks=ranks, num_microbatches=microbatches)
    timeline = pp.simulate(schedule, pp.Costs(82.5, 82.5, 82.5, latency=54))
    return timeline, pictures.tickets(timeline, at, 54, **options)


def built(name: str, cut=None, **options):
    return lambda: pictures.knobs(pp.build(name, num_ranks=4, num_microbatches=8, **options), cut=cut)


DRAWN = {
    "cut": lambda: pictures.cut_model([8, 8, 8, 8], STATE, 80, 67.1e6),
    "cut in two": lambda: pictures.cut_model([17, 15], [70, 58.5], 80, 67.1e6),
    "cut, still too large": lambda: pictures.cut_model([24, 4, 4], [97.1, 14, 22.4], 80, 900),
    "crossing": lambda: pictures.crossing((1, 8192, 4096), 2, (8, 8)),
    "crossing, small": lambda: pictures.crossing((16, 64, 768), 4, (3, 3)),
    "handshake": pictures.handshake,
    "held": lambda: pictures.what_is_held(STATE, SEQUENCE, {"GPipe": [8] * 4, "1F1B": [4, 3, 2, 1]}, 80),
    "held, and more": lambda: pictures.what_is_held(
        STATE, SEQUENCE, {"GPipe": [8] * 4, "1F1B": [4, 3, 2, 1]}, 80, ghosts={"GPipe": [32] * 4}, ghosts_are="M = 32"
    ),
    "held, little": lambda: pictures.what_is_held([1, 1], [0.4, 0.4], {"1F1B": [2, 1]}, 8, ghosts={"1F1B": [3, 1]}),
    "microbatches": lambda: pictures.more_microbatches(36.3, 9.13, 8, (1, 2, 4, 8), range(1, 9), 80),
    "knobs, naive": built("naive"),
    "knobs, interleaved": built("Interleaved1F1B", stages_per_rank=2),
    "knobs, V": built("ZBVZeroBubble"),
    "lives": lambda: pictures.lives(28, 6, 8),
    "lives, short and few": lambda: pictures.lives(1, 3, 2),
    "knobs, both ways": built("DualPipe"),
    "knobs, a long name": built("InterleavedZeroBubble", stages_per_rank=2),
    "knobs, uneven": built("1F1B", cut=[8, 9, 8, 7]),
    "knobs, uneven and many": built("Interleaved1F1B", cut=[3, 4, 4, 4, 4, 5, 5, 3], stages_per_rank=2),
    "floor": lambda: pictures.floor_receipt(4, 8),
    "floor of many": lambda: pictures.floor_receipt(8, 32),
    "floor of one": lambda: pictures.floor_receipt(1, 4),
    "experts": pictures.experts,
    "pair": pictures.pair,
    "pair on a slow network": lambda: pictures.pair(1, 4),
    "an unequal pair, in Megatron-LM's two orders": lambda: pictures.pair(
        3.1, 5.4, 7.2, orders=["a pair", "--delay-wgrad-compute"], unit="ms"
    ),
    "resident": lambda: pictures.resident(pp.build("1F1B", num_ranks=3, num_microbatches=4), 1),
    "resident of a V": lambda: pictures.resident(pp.build("ZBVZeroBubble", num_ranks=2, num_microbatches=4)),
    "fold": pictures.fold,
    "fold of six": lambda: pictures.fold(6),
    "tickets": lambda: ridden("1F1B", 1300)[1],
    "tickets, eager": lambda: ridden("eager-1F1B", 1300)[1],
    "tickets, parked": lambda: ridden("GPipe", 1500)[1],
    "tickets, before": lambda: ridden("1F1B", -1)[1],
    "tickets, a shorter loop": lambda: ridden("1F1B", 1300, turn=2)[1],
}


@pytest.fixture(scope="module", params=DRAWN)
def drawn(request):
    return DRAWN[request.param]()


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def test_it_says_in_words_what_it_shows(drawn):
    said = alternative_text(drawn.figure)
    assert said == drawn.get_label() and len(said) > 60 and said[0].isupper()
    amounts = [text.get_text() for text in drawn.texts if re.fullmatch(r"[\d.]+ (GB|MB)", text.get_text())]
    assert all(amount.split()[0] in said for amount in amounts)


def test_its_letters_stay_apart_and_inside(drawn):
    drawn.figure.canvas.draw()
    boxes = {text: text.get_window_extent() for text in drawn.texts if text.get_text()}
    for text, box in boxes.items():
        assert drawn.bbox.x0 - 2 <= box.x0 and box.x1 <= drawn.bbox.x1 + 2, text
        assert drawn.bbox.y0 - 2 <= box.y0 and box.y1 <= drawn.bbox.y1 + 2, text
    for one, other in combinations(boxes, 2):
        shared = min(boxes[one].x1, boxes[other].x1) - max(boxes[one].x0, boxes[other].x0)
        high = min(boxes[one].y1, boxes[other].y1) - max(boxes[one].y0, boxes[other].y0)
        assert shared <= 1 or high <= 3, (one, other)  # a line's box is taller than its letters


def test_a_phone_shows_it_whole_with_letters_of_nine_pixels(drawn):
    svg = figure_html(drawn.figure)
    assert svg == figure_html(drawn.figure), "executed again, a notebook would change"
    width, least = (float(re.search(how, svg)[1]) for how in (r'viewBox="0 0 ([\d.]+)', r"min-width:(\d+)px"))
    assert least <= PHONE
    assert min(text.get_fontsize() for text in drawn.texts) * min(PHONE, width * 4 / 3) / width >= 9


def test_its_colours_fit_light_and_dark(drawn):
    """What is neither the text's colour, nor the drawings' own, nor on one of those, would vanish on one page."""
    fixed = {_canvas.BLUE, _canvas.ORANGE, _canvas.LIMIT, _canvas.GREY, "#d5d8dd", *palette.FILL.values()}
    for text in drawn.texts:
        colour = to_hex(text.get_color())
        x, y = text.get_position()
        under = [p for p in drawn.patches if p.contains_point(drawn.transData.transform((x, y)))]
        on_fill = any(p.get_facecolor()[3] == 1 and p.get_facecolor()[:3] != (0, 0, 0) for p in under)
        assert colour in ("#000000", _canvas.LIMIT) or on_fill, text
    for patch in drawn.patches:
        for r, g, b, opacity in (patch.get_facecolor(), patch.get_edgecolor()):
            shades = {to_hex(to_rgba(fill)) for fill in fixed}
            own = (r, g, b) == (0, 0, 0) or not opacity or to_hex((r, g, b)) in shades
            assert own or (r, g, b) == (1, 1, 1) or min(r, g, b) > 0.15, patch


def rectangles(ax, colour: str = "", opacity: float | None = None) -> list[Rectangle]:
    found = [p for p in ax.patches if isinstance(p, Rectangle) and p.get_width() > 1e-9 and p.get_height() > 1e-9]
    if colour:
        found = [p for p in found if to_hex(p.get_facecolor()[:3]) == to_hex(colour) and p.get_facecolor()[3]]
    return [p for p in found if opacity is None or p.get_facecolor()[3] == pytest.approx(opacity)]


def test_cards_are_as_full_as_the_numbers_say():
    ax = DRAWN["cut"]()
    full = [p.get_width() for p in rectangles(ax, "black", _canvas.STATE[1])]
    cards = [p.get_width() for p in rectangles(ax) if not p.get_facecolor()[3]]
    (over,) = (p.get_width() for p in rectangles(ax, _canvas.LIMIT))
    assert [80 * width / cards[0] for width in full[1:]] == pytest.approx(STATE)
    assert 80 * (full[0] + over) / cards[0] == pytest.approx(sum(STATE)) and full[0] == pytest.approx(cards[0])
    layers = rectangles(ax, "black", _canvas.EDGE[1])
    assert len(layers) == 32
    assert {f"after {n}" for n in (8, 16, 24)} <= {text.get_text() for text in ax.texts}
    assert "Cut into stages of 8, 8, 8 and 8 layers" in ax.get_label() and "every one fits" in ax.get_label()
    assert "not every one fits" in DRAWN["cut, still too large"]().get_label()


def test_a_message_has_the_bytes_of_its_shape():
    said = DRAWN["crossing"]().get_label()
    assert "1 × 8,192 × 4,096 values, 67 MB" in said
    texts = {text.get_text() for text in DRAWN["crossing, small"]().texts}
    assert {"activation, 3.1 MB", "its gradient, 3.1 MB", "layers 0 to 2", "layers 3 to 5"} <= texts
    assert [_canvas.named_bytes(n) for n in (900, 67.1e6, 4.2e9, 180e3, 999.7)] == [
        "900 bytes", "67 MB", "4.2 GB", "180 kB", "1000 bytes"]  # fmt: skip


def test_gradients_are_where_autograd_has_put_them():
    """The picture against the real thing: who has gradients after each of the lines that it shows."""
    torch = pytest.importorskip("torch")
    ax = pictures.handshake()
    front, back = ([torch.nn.Linear(2, 2) for _ in range(n)] for n in (3, 3))
    names = {"front": torch.nn.Sequential(*front), "back": lambda r: torch.nn.Sequential(*back)(r).sum()}
    names["x"] = torch.ones(1, 2)
    codes = [text for text in ax.texts if "(" in text.get_text()]
    circles = [p for p in ax.patches if isinstance(p, Circle) and p.radius == 8]
    for line in sorted(codes, key=lambda text: -text.get_position()[1]):
        exec(line.get_text(), names)
        low = line.get_position()[1] - 26
        beads = sorted((p for p in circles if p.center[1] == pytest.approx(low)), key=lambda p: p.center[0])
        drawn = [to_hex(p.get_facecolor()) == _canvas.ORANGE for p in beads]
        assert drawn == [layer.weight.grad is not None for layer in (*front, *back)], line
        squares = sorted((p for p in rectangles(ax) if p.get_y() == pytest.approx(low - 8)), key=lambda p: p.get_x())
        for square, name in zip(squares, ("sent", "received"), strict=True):
            tensor = names.get(name)
            has = tensor is not None and tensor.is_leaf and tensor.grad is not None  # of no leaf, torch keeps it not
            assert (to_hex(square.get_facecolor()) == _canvas.ORANGE) == has, (line, name)
    assert "front and back after sent.backward(received.grad)" in ax.get_label()


def test_every_brick_is_a_microbatch():
    ax = DRAWN["held"]()
    scale = min(p.get_height() for p in rectangles(ax, "black", _canvas.STATE[1])) / 27.9
    light, dark = pp.plot.shade(_canvas.BLUE, 1, 2), _canvas.BLUE
    assert len(rectangles(ax, dark)) == 4 + 3 + 2 + 1
    over = rectangles(ax, _canvas.LIMIT)
    assert len(rectangles(ax, light)) + len(over) == 4 * 8 + 4  # on every rank, one brick lies across the line
    assert sum(p.get_height() for p in rectangles(ax, dark)) == pytest.approx(10 * (9.13 * scale - 1.4))
    base = rectangles(ax, "black", _canvas.STATE[1])[0].get_y()
    tops: dict[float, float] = {}
    for p in over:
        tops[p.get_x()] = max(tops.get(p.get_x(), 0), (p.get_y() + p.get_height() - base) / scale)
    assert list(tops.values()) == pytest.approx([109.3, 100.9, 100.9, 109.3], abs=0.1)
    said = DRAWN["held, and more"]().get_label()
    assert "GPipe 109.3, 100.9, 100.9 and 109.3; 1F1B 72.8, 55.3, 46.2 and 45.4. M = 32: GPipe 328.5" in said


def test_thinner_microbatches_hold_the_same_and_more_break_the_line():
    ax = DRAWN["microbatches"]()
    tops: dict[float, float] = {}
    for p in rectangles(ax):
        tops[round(p.get_x(), 3)] = max(tops.get(round(p.get_x(), 3), 0), p.get_y() + p.get_height())
    heights = [tops[x] for x in sorted(tops)]
    assert heights[:4] == pytest.approx([heights[0]] * 4) and heights[-1] == pytest.approx(heights[0])
    steps = [b - a for a, b in zip(heights[4:], heights[5:], strict=False)]
    assert steps == pytest.approx([steps[0]] * 7)
    broken = {round(p.get_x(), 3) for p in rectangles(ax, _canvas.LIMIT)}
    assert broken == {x for x in tops if sorted(tops).index(x) not in (4, 5, 6, 7)}
    assert ax.get_label().endswith("under the line at 80 GB, up to 4 fit")


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("GPipe", {}, "4 pieces; on which rank: one per rank; what to run next: GPipe"),
        ("Interleaved1F1B", {"stages_per_rank": 3}, "12 pieces; on which rank: 3 per rank, in a loop"),
        ("ZBVZeroBubble", {}, "8 pieces; on which rank: 2 per rank, in a V"),
        ("DualPipe", {}, "4 pieces; on which rank: both ways at once"),
    ],
)
def test_knobs_stand_as_the_schedule_sets_them(name, options, says):
    schedule = pp.build(name, num_ranks=4, num_microbatches=12, **options)
    ax = pictures.knobs(schedule)
    assert says in ax.get_label()
    held = sum(len(schedule.stages_of(rank)) for rank in range(4))
    assert len(rectangles(ax, "black", _canvas.EDGE[1])) == schedule.num_stages + held
    assert len(rectangles(ax, "black", _canvas.FAINT[1])) == 4 * schedule.num_stages - held
    shown = [action.kind for row in schedule.rows for item in row[:16] for action in pp.actions.parts(item)]
    cells = [p for p in rectangles(ax) if p.get_facecolor()[:3] != (0, 0, 0)]
    assert len(cells) == len(shown)
    assert ("…" in {text.get_text() for text in ax.texts}) == (max(map(len, schedule.rows)) > 16)


def test_eight_slices_are_shown_whole_where_a_rank_has_one_stage():
    ax = pictures.knobs(pp.build("GPipe", num_ranks=4, num_microbatches=8))
    assert len([p for p in rectangles(ax) if p.get_facecolor()[:3] != (0, 0, 0)]) == 4 * 16
    assert "…" not in {text.get_text() for text in ax.texts}


def test_a_knob_shows_an_uneven_cut():
    ax = DRAWN["knobs, uneven"]()
    pieces = [p.get_width() for p in rectangles(ax, "black", _canvas.EDGE[1]) if p.get_x() < _canvas.WIDTH / 3]
    assert [7 * width / pieces[-1] for width in pieces] == pytest.approx([8, 9, 8, 7])
    assert "where to cut: 8+9+8+7;" in ax.get_label()


@pytest.mark.parametrize(("P", "M"), [(4, 8), (3, 5), (2, 1)])
def test_the_receipt_is_the_floor(P, M):
    F, B = 1, 2
    ax = pictures.floor_receipt(P, M)
    total = pp.simulate(pp.build("1F1B", num_ranks=P, num_microbatches=M), pp.Costs(F, B, 0)).makespan
    assert ax.get_label().endswith(f"= {total:g} units")
    (work,) = rectangles(ax, "black", _canvas.STATE[1])
    down, up = rectangles(ax, _canvas.BLUE), rectangles(ax, _canvas.ORANGE)
    unit = work.get_width() / (M * (F + B))
    assert len(down) == len(up) == P - 1
    assert [p.get_width() / unit for p in (*down, *up)] == pytest.approx([F] * (P - 1) + [B] * (P - 1))
    assert max(p.get_x() + p.get_width() for p in down) == pytest.approx(work.get_x())
    assert min(p.get_x() for p in up) == pytest.approx(work.get_x() + work.get_width())
    assert [p.get_y() for p in down] == sorted((p.get_y() for p in down), reverse=True)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", ["naive", "GPipe", "1F1B", "eager-1F1B"])
def test_tickets_are_where_the_timeline_has_them(name, seed):
    rng = random.Random(f"{name} {seed}")
    timeline, _ = ridden(name, 0, ranks=rng.randint(1, 5), microbatches=rng.randint(1, 9))
    schedule = timeline.schedule
    for at in (0, *(rng.uniform(0, timeline.makespan) for _ in range(4)), timeline.makespan):
        ax = pictures.tickets(timeline, at, 54)
        now = [span for span in timeline.spans if span.start <= at < span.end]
        begun = {s.action.microbatch for s in timeline.spans if s.start <= at}
        done = {s.action.microbatch for s in timeline.spans if str(s.action).startswith("0B") and s.end <= at}
        waiting = schedule.num_microbatches - len(begun)
        assert len(begun - done) <= schedule.peak_in_flight[0]
        assert re.findall(r"(\d+) ride, (\d+) wait in front of it, (\d+) are done; (\d+) of", ax.get_label()) == [
            tuple(map(str, (len(begun - done), waiting, len(done), len(now))))
        ]
        texts = [text.get_text() for text in ax.texts]
        assert sum("idle" in text for text in texts) == schedule.num_ranks - len(now)
        more = sum(int(text[1:]) for text in texts if text.startswith("+"))
        assert len([p for p in ax.patches if isinstance(p, Circle)]) + more == len(begun - done) + waiting


def test_a_shorter_loop_turns_under_its_rank():
    arrows = [
        sum(isinstance(p, FancyArrowPatch) for p in ridden("1F1B", 1300, **turn)[1].patches)
        for turn in ({}, {"turn": 2}, {"turn": 3})
    ]
    assert arrows[1] == arrows[0] + 1 and arrows[2] == arrows[0]


def test_a_message_rides_its_wire():
    """Half of the latency after F of microbatch 0 on rank 0, its ticket is half way to rank 1."""
    places = []
    for waited in (0.001, 27, 53.999):
        ax = ridden("1F1B", 82.5 + waited)[1]
        first = next(text for text in ax.texts if text.get_text() == "0")
        places.append(first.get_position())
    (x, top), middle, (_, bottom) = places
    assert middle == pytest.approx((x, (top + bottom) / 2)) and top > bottom


@pytest.mark.parametrize(
    ("draw", "says"),
    [
        (lambda: pictures.cut_model([16, 16], [64], 80, 1), "2 stages, 1 amounts"),
        (lambda: pictures.handshake(["loss.backward()"]), "5 lines of code, got 1"),
        (lambda: pictures.what_is_held([1, 1], [1, 1], {"GPipe": [8]}, 80), "GPipe: expected one number per rank, 2"),
        (lambda: pictures.more_microbatches(1, 1, 8, (1, 3), (1,), 8), "divide 8 sequences, got 3"),
        (lambda: pictures.knobs(pp.build("GPipe", num_ranks=2, num_microbatches=2), cut=[1]), "per stage, 2, got 1"),
        (lambda: pictures.knobs(pp.build("GPipe", num_ranks=2, num_microbatches=2), words=["a"]), "3 knobs"),
        (lambda: ridden("ZB-H1", 0), "whole backwards, got ZB-H1"),
        (lambda: ridden("ZBVZeroBubble", 0), "one stage per rank, got 8 stages on 4 ranks"),
    ],
)
def test_what_cannot_be_drawn_is_refused(draw, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        draw()
