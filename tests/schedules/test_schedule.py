"""Actions, schedules, the dependency rule, and PyTorch's CSV form."""

import random

import pytest

import pplab as pp
from conftest import is_ready, random_schedule
from pplab import lab
from pplab.actions import SEND_F
from pplab.builders._weave import actions_of
from pplab.deps import incoming, needs, outgoing
from pplab.text import overlap
from pplab_course.figures import schedule_html


@pytest.mark.parametrize("text", ["0F0", "12B345", "3I7", "3W7", "1SEND_F0", "1RECV_F0", "2SEND_B1", "0RECV_B9"])
def test_text_form_of_an_action_is_read_back(text):
    assert str(pp.parse(text)) == text
    assert pp.parse(f"  {text} ") == pp.parse(text)


def test_text_form_of_an_overlap_is_read_back():
    for text in ("(0F3;1I2)OVERLAP_F_I", "(0W1;0I2)OVERLAP_W_I", "(2W1;0F2)OVERLAP_W_F", "(0F7;7B3)OVERLAP_F_B"):
        assert str(pp.parse(text)) == text
    assert pp.parse(text) == pp.Overlap(pp.Action(0, pp.Kind.F, 7), pp.Action(7, pp.Kind.B, 3))


@pytest.mark.parametrize(
    "junk",
    ["", "F0", "0F", "0X3", "-1F0", "0F0.5", "0f0", "0F0 1F0", "(0F7;7B3)", "(0B7;7F3)OVERLAP_F_B", "(0F1)OVERLAP_F_B"],
)
def test_junk_is_not_an_action(junk):
    with pytest.raises(ValueError, match="is not an (action|overlap): expected"):
        pp.parse(junk)


def test_an_overlap_is_of_two_different_things():
    for halves in ("0F0 0B0", "0I0 0W0", "0W0 0F0", "0F0 0F0"):  # one waits for the other, or is it
        with pytest.raises(ValueError, match="not an overlap: expected two computations, of different stages or micro"):
            overlap(*map(pp.parse, halves.split()))
    with pytest.raises(ValueError, match=r"\(0F0;0I1\)OVERLAP_F_B' is not an overlap: expected \(0F0;0I1\)OVERLAP_F_I"):
        pp.parse("(0F0;0I1)OVERLAP_F_B")


def test_actions_makes_many():
    assert actions_of(2, pp.Kind.B, range(3)) == [pp.Action(2, pp.Kind.B, m) for m in range(3)]
    assert all(type(a) is pp.Action for a in actions_of(2, pp.Kind.B, range(3)))


def test_a_schedule_knows_its_sizes_and_placement():
    s = pp.Schedule([["0F0", "3F0", "3B0", "0B0"], ["1F0", "2F0", "2B0", "1B0"]], name="V")
    assert (s.num_ranks, s.num_stages, s.num_microbatches) == (2, 4, 1)
    assert s.placement == (0, 1, 1, 0)
    assert s.stages_of(0) == (0, 3)
    assert repr(s) == "<Schedule V: 2 ranks, 4 stages, 1 microbatch, 8 actions>"
    assert str(s).splitlines()[1] == "rank 0  0F0 3F0 3B0 0B0"
    assert s == pp.Schedule(s.rows, name="another name")


def test_a_bidirectional_schedule_has_two_ranks_per_stage():
    s = pp.Schedule([["0F0", "1F1", "1B1", "0B0"], ["1F0", "0F1", "1B0", "0B1"]])
    assert s.placement == ((0, 1), (0, 1))


def test_a_schedule_draws_itself_in_a_notebook():
    page = schedule_html(pp.build("1F1B", num_ranks=2, num_microbatches=40))
    assert page.count("<tr>") == 2
    assert "0F0" in page and "16 more" in page


def test_peaks_count_from_forward_to_the_weight_gradient():
    s = pp.Schedule([["0F0", "0F1", "0I0", "0F2", "0W0", "0I1", "0W1", "0B2"]])
    assert s.peak_in_flight == (3,)
    assert s.peak_held([10]) == (30,)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ("0F0", "rows must be one sequence"),
        ([], "at least one action"),
        ([[], []], "at least one action"),
        ([["0F0", 3]], "rank 0: 3 is not an action"),
        ([[pp.Action(-1, pp.Kind.F, 0)]], "stage must be a whole number of at least 0, got -1"),
        ([["0F0"], 3], "rows must be one sequence of actions per rank"),
        ([[pp.Action(0, "F", 0)]], "kind must be a pplab.Kind, such as Kind.F, not a str"),
        ([["0F0", "0F999999999"]], "1 stage and 1000000000 microbatches need more than 2 actions; number stages and"),
        ([["99999F99999"]], "100000 stages and 100000 microbatches need more than 1 action;"),
        (
            [[pp.Overlap(pp.parse("0F0"), pp.parse("0SEND_F1"))]],
            r"\(0F0, 0SEND_F1\) is not an overlap: expected two comp",
        ),
        ([[pp.Overlap(pp.parse("1F0"), pp.parse("1B0"))]], "of different stages or microbatches, as in"),
        ([[pp.Overlap(1, 2)]], r"\(1, 2\) is not an overlap"),
        ([[pp.Action(0, pp.Kind.F, 0.5)]], "microbatch must be a whole number of at least 0, got 0.5"),
    ],
)
def test_a_malformed_schedule_is_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        pp.Schedule(rows)


def test_the_rule_and_its_integers_agree(rng):
    for _ in range(40):
        s = random_schedule(rng)
        place = {a: i for i, a in enumerate(a for row in s.rows for a in row)}
        for action, i in place.items():
            for need in needs(action, s.num_stages):
                found = [place[a] for k in need.kinds if (a := pp.Action(need.stage, k, need.microbatch)) in place]
                assert len(found) == 1
            first = [] if action.kind is pp.Kind.W else needs(action, s.num_stages)[:1]
            awaited = [place[a] for n in first for k in n.kinds if (a := pp.Action(n.stage, k, n.microbatch)) in place]
            assert s.graph.awaited(i) == [(i, maker) for maker in awaited]
        assert s.graph.whole


def test_an_overlap_has_one_id_and_sends_two_messages():
    """Ids are 0F0 0, the overlap 1, 0B1 2, 1F0 3, 1B0 4, 1F1 5, 1B1 6; the overlap's backward is entry 7."""
    s = pp.Schedule([["0F0", "(0F1;0B0)OVERLAP_F_B", "0B1"], ["1F0", "1B0", "1F1", "1B1"]])
    assert s.columns.overlaps == [1] and s.graph.id_of(7) == 1 and str(s.graph.action(7)) == "0B0"
    assert s.graph.second_half == {1: 7}
    assert s.graph.awaited(1) == [(7, 4)]  # a forward of the first stage waits for nothing
    assert s.graph.awaited(5) == [(5, 1)]


def test_the_rule_is_the_one_that_the_tests_know(rng):
    s = random_schedule(rng)
    done: set = set()
    everything = {(a.stage, str(a.kind), a.microbatch) for row in s.rows for a in row}
    for action in everything:
        wanted = needs(pp.Action(action[0], pp.Kind(action[1]), action[2]), s.num_stages)
        have = {(n.stage, str(k), n.microbatch) for n in wanted for k in n.kinds}
        assert is_ready(action, have, s.num_stages)
        for missing in wanted:
            less = have - {(missing.stage, str(k), missing.microbatch) for k in missing.kinds}
            assert not is_ready(action, less | done, s.num_stages)


def test_what_goes_out_comes_in():
    for stage in range(3):
        for kind in (pp.Kind.F, pp.Kind.B, pp.Kind.I, pp.Kind.W):
            message = outgoing(pp.Action(stage, kind, 5), 3)
            if message is None:
                continue
            user_kind = pp.Kind.F if message.send.kind is SEND_F else kind
            assert incoming(pp.Action(message.receive.stage, user_kind, 5), 3) == message.receive


def test_lowering_sends_what_crosses_ranks_and_nothing_else():
    rows = pp.lower(pp.Schedule([["0F0", "3F0", "3B0", "0B0"], ["1F0", "2F0", "2B0", "1B0"]]))
    assert " ".join(map(str, rows[0])) == "0F0 0SEND_F0 3RECV_F0 3F0 3B0 3SEND_B0 0RECV_B0 0B0"
    assert " ".join(map(str, rows[1])) == "1RECV_F0 1F0 2F0 2SEND_F0 2RECV_B0 2B0 1B0 1SEND_B0"


def test_a_name_is_not_lowered():
    with pytest.raises(ValueError, match="schedule must be a Schedule, got '1F1B': pplab.build"):
        pp.lower("1F1B")


@pytest.mark.parametrize("ahead", [0, 1, 3])
def test_lowered_rows_keep_every_channel_in_order(rng, ahead):
    for _ in range(20):
        s = random_schedule(rng)
        rows = pp.lower(s, ahead=ahead)
        home = s.home()
        sent, received = {}, {}
        for rank, row in enumerate(rows):
            assert tuple(a for a in row if a.kind in pp.actions.COMPUTE) == s.rows[rank]
            for a in row:
                if a.kind in (pp.Kind.SEND_F, pp.Kind.SEND_B):
                    to = a.stage + (1 if a.kind is pp.Kind.SEND_F else -1)
                    other = pp.Action(to, pp.Kind.RECV_F if a.kind is pp.Kind.SEND_F else pp.Kind.RECV_B, a.microbatch)
                    sent.setdefault((rank, home[to, a.microbatch]), []).append(other)
                elif a.kind in (pp.Kind.RECV_F, pp.Kind.RECV_B):
                    source = a.stage + (-1 if a.kind is pp.Kind.RECV_F else 1)
                    received.setdefault((home[source, a.microbatch], rank), []).append(a)
        assert sent == received
        for row in rows:
            seen = set()
            for a in row:
                need = a.kind in pp.actions.COMPUTE and incoming(a, s.num_stages)
                if (
                    need
                    and home[need.stage + (-1 if need.kind is pp.Kind.RECV_F else 1), a.microbatch]
                    != home[a.stage, a.microbatch]
                ):
                    assert need in seen
                seen.add(a)


def test_csv_is_read_back(rng):
    s = random_schedule(rng)
    assert lab.read_csv(lab.to_csv(s)) == s


def test_csv_takes_text_files_and_lowered_files(tmp_path):
    text = "0F0, 0F1,,0B0,0B1\n1F0,1B0,1F1,1B1,,\n"
    s = lab.read_csv(text)
    assert s.rows[0] == tuple(map(pp.parse, ["0F0", "0F1", "0B0", "0B1"]))
    assert lab.to_csv(s) == "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
    path = tmp_path / "a schedule.csv"
    path.write_text(text)
    assert lab.read_csv(path) == lab.read_csv(str(path)) == s
    lowered = (
        "0UNSHARD,0F0,0SEND_F0,0RECV_B0,0B0,0WAIT_SEND_F0,0REDUCE_GRAD,0WAIT_REDUCE_GRAD\n1RECV_F0,1F0,1B0,1SEND_B0\n"
    )
    assert lab.to_csv(lab.read_csv(lowered)) == "0F0,0B0\n1F0,1B0\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0F0,0Q0\n", r"CSV row 1 \(rank 0\), column 2: '0Q0' is not an action"),
        ("0F0,0B0\n1F0,hello\n", r"CSV row 2 \(rank 1\), column 2: 'hello'"),
        (",,\n,\n", "holds no action"),
        ("0F0" * 100, r"'0F00F00F0.* \.\.\. is not an action"),
        ("0F0,0B0," + "x" * 200_000, "this is no CSV .*field larger than"),
    ],
)
def test_junk_in_a_csv_is_located(text, message):
    with pytest.raises(pp.ScheduleError, match=message):
        lab.read_csv(text)


def test_what_spreadsheets_write_is_read(tmp_path):
    """A mark of the encoding in front, and rows of blank cells behind. A blank row between others stays a rank."""
    path = tmp_path / "saved.csv"
    path.write_text("\ufeff0F0,0B0\r\n,,\r\n,,\r\n")
    for source in (path, str(path), "0F0,0B0\n,,\n\n"):
        assert lab.read_csv(source) == pp.Schedule([["0F0", "0B0"]])
    between = lab.read_csv("0F0,0B0\n,,\n1F0,1B0\n")
    for act in (pp.validate, pp.simulate):
        with pytest.raises(pp.ScheduleError, match="rank 1 has nothing to run; remove its row"):
            act(between)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nothing.csv"):
        lab.read_csv(str(tmp_path / "nothing.csv"))


def test_random_schedules_cover_what_they_should():
    """The generator is part of the tests: it must produce split backwards, several stages a rank, and V placements."""
    made = [random_schedule(random.Random(seed)) for seed in range(200)]
    assert any(pp.Kind.I in s.columns.kinds and pp.Kind.B in s.columns.kinds for s in made)
    assert any(len(s.stages_of(0)) > 2 for s in made)
    assert any(s.num_stages > 1 and s.placement[-1] == s.placement[0] for s in made)
