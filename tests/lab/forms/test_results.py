"""What is recorded of GPUs is shown, and what pages say of GPUs is what is recorded."""

from __future__ import annotations

import inspect
import json
import os
import pickle
import re
import socket
import subprocess
import sys
import textwrap
from importlib.metadata import entry_points
from itertools import pairwise
from pathlib import Path

import gpu_tables
import pytest
import torch
import torch.distributed.run
from torch.distributed.flight_recorder import fr_trace

from conftest import on_fake_gpus
from pplab import lab
from pplab.lab import Case, results
from pplab.runtime import gpu
from stage_rows import copies_are_sane, stages_are_sane

ROOT = Path(__file__).parents[3]
NONE = "Nothing has been measured on a GPU so far."
PAGE = (ROOT / "book" / "gpu.md").read_text()
HANGS_PAGE = (ROOT / "book" / "it_hangs.md").read_text()

# The parts of `make gpu` that say something here; test_gpu_box.py, at length, runs all.
MEASURED = ("smoke", "nccl", "stages", "copies", "batch", "predicted", "gradients", "links", "runs")

# A card whose nvidia-smi answers, with another clock each time.
SMI = """#!/bin/sh
case "$1" in
*clocks.sm*) echo "1$(date +%S)0 MHz, 312.50 W, 4$(date +%S | cut -c2)" ;;
*) echo "580.65.06, Default, [N/A]" ;;
esac
"""


@pytest.fixture
def pages(monkeypatch):
    """book/_ext/pplab_recorded.py."""
    monkeypatch.syspath_prepend(str(ROOT / "book" / "_ext"))
    import pplab_recorded

    return pplab_recorded


@pytest.fixture(scope="module")
def recorded(tmp_path_factory) -> tuple[Path, str]:
    """The folder of some parts, measured on a GPU that tests/fake_gpus plays; and what was printed."""
    folder, tools = tmp_path_factory.mktemp("results"), tmp_path_factory.mktemp("bin")
    (tools / "nvidia-smi").write_text(SMI)
    (tools / "nvidia-smi").chmod(0o755)
    command = ["benchmarks/gpu.py", "--size", "small", "--folder", str(folder), "--only", "check", *MEASURED]
    done = on_fake_gpus(command, 1, PATH=f"{tools}{os.pathsep}{os.environ['PATH']}")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    return folder, done.stdout


def numbers_aside(text: str) -> str:
    """A text whose decimal numbers are all the same, and so what parameter has the largest."""
    return re.sub(r"(\d\.\de[+-]\d\d)( apart in \S+)?", "0.0e-00", text)


def test_without_a_recording_pages_say_so(pages, tmp_path):
    (tmp_path / "attacks.json").write_text((ROOT / "results" / "attacks.json").read_text())  # of no GPU
    assert results.said(tmp_path) == NONE and pages.first_look(tmp_path) is None
    assert not gpu_tables.tables(tmp_path)
    said = pages.sentences(tmp_path, ROOT / "notebooks")
    assert said["measured_on_gpus"] == NONE
    assert said["healthy_run"].startswith(
        "No GPU has been recorded. One that the tests play on the CPU prints:\n\n```text\n"
    )
    assert " ".join(pages.PLAYED.read_text().split()) in " ".join(said["healthy_run"].split())
    assert max(map(len, said["healthy_run"].splitlines())) <= 80


@pytest.mark.slow
def test_with_one_they_name_the_device_and_the_day(pages, recorded):
    folder, printed = recorded
    day = json.loads((folder / "fake-gpu.json").read_text())["date"][:10]
    assert results.said(folder) == f"Measured on GPUs so far: Fake GPU, {day}."
    said = pages.sentences(folder, ROOT / "notebooks")
    assert said["measured_on_gpus"] == results.said(folder)
    assert said["healthy_run"].startswith(
        f"Fake GPU, {day}, printed:\n\n```text\n1F1B, 2 ranks, fp32: gradients equal to one"
    )
    title, lines = pages.first_look(folder)
    assert title == f"Fake GPU, {day}" and all(line in printed.splitlines() for line in lines)
    assert numbers_aside("\n".join(lines)) == numbers_aside(pages.PLAYED.read_text().strip())


@pytest.mark.slow
def test_what_parts_measure_is_what_they_say(recorded):
    (recording,) = results.load(recorded[0])
    stages_are_sane(recording.rows("stages"), {"bf16": ("GPU", "launches"), "fp32": ("GPU", "launches")})
    copies_are_sane(recording)
    for row in recording.rows("runs"):
        assert row["peak_bytes"] == row["predicted_peak_bytes"] and not row["wrong"]
    (row,) = recording.rows("predicted")
    assert [each["schedule"] for each in row["schedules"]] == ["ZB-H1", "1F1B"]


@pytest.mark.slow
def test_every_table_that_has_rows_is_shown_and_no_other(recorded):
    folder = recorded[0]
    made = gpu_tables.tables(folder)
    lacks = {shape.name for shape in gpu_tables.SHAPES if shape.of_gpus} - set(made)
    assert lacks == {"assumptions", "tests"} and all(made.values())
    (machine,), (link,) = made["machines"], made["links"]
    assert machine[2] == "580.65.06" and torch.__version__ in machine[3]
    assert link[1:3] == ("0 and 1", "gloo") and link[-2].startswith("64 B ") and " 16 MiB " in link[-2]
    assert link[-1] == "whole" and float(made["batch"][0][-1]) > 0
    assert {row[4] for row in made["gradients"]} == {"2 of 2"} and {row[-1] for row in made["gradients"]} == {"-"}
    assert {row[3] for row in made["gradients"]} == {"shared", "nccl"}
    ((_, _, sharing, what, how),) = made["nccl"]
    assert (sharing, what) == ("turns", "cudaMalloc during a receive") and "for the receive" in how
    for row in made["runs"]:
        assert re.fullmatch(r"\d+\.\d \(\d+\.\d\)", row[7]) and re.fullmatch(r"0\.\d{3} \(0\.\d{3}\)", row[8])
        assert row[-3] == "-" and re.fullmatch(r"1\d\d0", row[-2])  # of one step none can say
        shares = re.findall(r"[\w ]+ (-?\d+\.\d)%", row[-1])
        assert len(shares) > 1 and sum(map(float, shares)) == pytest.approx(100, abs=1)
    assert {row[1] for row in made["clocks"]} == {*MEASURED}
    assert all(re.fullmatch(r"1\d\d0( to 1\d\d0)?", row[3]) and row[4] in ("312", "313") for row in made["clocks"])


def test_tables_say_what_went_wrong(tmp_path):
    """Of an assumption that doesn't hold, a run that was ended, and a schedule that is wrong."""
    row = {"assumption": "cudaMalloc waits", "expected": True, "found": False, "agrees": False, "documents": "a guide"}
    row["measured"] = {"host_ms": 101.5, "errors_ms": [0.1, 0.3, 0.2]}
    right = {"num_ranks": 2, "dtype": "fp32", "transport": "nccl", "relative": 1e-8, "wrong": []}
    off = {**right, "relative": 0.5, "wrong": ["gradients differ"]}
    hung = {
        "num_ranks": 3,
        "sharing": "mps",
        "schedule": "1F1B",
        "ended": False,
        "said": "no rank\nmade",
        "seconds": 20.0,
    }
    parts = {
        "assumptions": [row],
        "gradients": [{"schedule": "1F1B", **right}, {"schedule": "ZB-V", **off}],
        "nccl": [hung],
        "tests": [{"test": "a", "outcome": "passed"}, {"test": "b", "outcome": "failed"}],
    }
    write(tmp_path, parts)
    made = gpu_tables.tables(tmp_path)
    ((_, what, expected, found, agrees, measured, by),) = made["assumptions"]
    assert (what, expected, found, agrees, by) == ("cudaMalloc waits", "yes", "NO", "NO", "a guide")
    assert measured == "host_ms 102, errors_ms 0.2"
    assert made["gradients"][0][4:] == ("1 of 2", "5.0e-01 of its norm", "ZB-V")
    assert made["nccl"][0][4] == "no rank" and made["tests"][0][1:] == ("all", "1 passed, 1 failed")


def write(folder: Path, parts: dict[str, list]) -> None:
    """A recording of two GPUs."""
    made = [{"name": name, "state": "done", "seconds": 1, "rows": rows} for name, rows in parts.items()]
    about = {
        "form": 1,
        "device": "NVIDIA H100",
        "kind": "cuda",
        "date": "2026-12-01T20:00:00+00:00",
        "command": "make gpu",
    }
    box = {"devices": [{"name": "NVIDIA H100", "memory_bytes": 85e9, "compute_capability": "9.0"}] * 2, "driver": None}
    data = {
        **about,
        "versions": {"torch": "2.13.0", "cuda": "13.0", "nccl": None},
        "box": box,
        "parts": made,
        "not_run": [],
    }
    (folder / "nvidia-h100-x2.json").write_text(json.dumps(data))


def test_a_long_table_is_folded_and_several_gpus_are_counted(tmp_path):
    row = {"num_ranks": 3, "sharing": "mps", "schedule": "1F1B", "ended": True, "said": "", "seconds": 1.0}
    write(tmp_path, {"nccl": [row] * gpu_tables.LONG})
    assert results.said(tmp_path) == "Measured on GPUs so far: 2 x NVIDIA H100, 2026-12-01."
    assert "<details>" not in gpu_tables.tables(tmp_path)["nccl"]._repr_html_()
    write(tmp_path, {"nccl": [row] * (gpu_tables.LONG + 1)})
    assert (
        gpu_tables.tables(tmp_path)["nccl"]
        ._repr_html_()
        .startswith("<details><summary>Ranks on one GPU that send by NCCL")
    )
    write(tmp_path, {"nccl": []})  # nothing came of it
    assert results.said(tmp_path) == NONE


def test_the_recordings_are_found_from_anywhere(monkeypatch):
    monkeypatch.chdir("/")
    assert results.find_folder() == ROOT / "results"


def test_what_the_readme_and_the_page_say_of_gpus_is_what_is_recorded(pages):
    """It fails when something is recorded: write the sentence into README.md. The page writes it by itself."""
    said = results.said(ROOT / "results")
    readme = " ".join((ROOT / "README.md").read_text().split())
    assert said in readme and ("on CPU so far" in readme) == (said == NONE)
    assert "{{ measured_on_gpus }}" in PAGE and "\n## Recorded results\n" in PAGE
    assert pages.sentences(ROOT / "results", ROOT / "notebooks")["executed_on"] in readme


def test_where_the_notebooks_ran_is_read_off_them(pages, tmp_path):
    def sentence(output: str) -> str:
        cells = [
            {"cell_type": "code", "outputs": [{"text": [output]}]},
            {"cell_type": "markdown", "source": "on cuda:0"},
        ]
        (tmp_path / "a.ipynb").write_text(json.dumps({"cells": cells}))
        return pages.sentences(tmp_path, tmp_path)["executed_on"]

    assert sentence("1F1B, measured: 2 ranks on cpu (shared memory)") == "two CPU cores"
    assert sentence("1F1B, measured: 2 ranks on cuda:0, cuda:1 (nccl)") == "a machine with GPUs"


def test_every_name_in_braces_is_known(pages):
    known = pages.sentences(ROOT / "results", ROOT / "notebooks")
    asked = {name for path in (ROOT / "book").glob("*.md") for name in re.findall(r"\{\{ (\w+) \}\}", path.read_text())}
    assert asked == {*known, "course_in_figures"}  # the last one by book/_ext/pplab_front.py


HANGS = """
import modules
import pplab as pp
from torch import nn
from pplab.runtime import Pool, RankError, failures

failures.ALL_WAIT_S = 3.0  # in place of ten

if __name__ == "__main__":
    s = pp.build("1F1B", num_ranks=2, num_microbatches=4)
    try:
        Pool(2, timeout_s=60).train(s, modules.workload(nn.Linear(6, 6), nn.Linear(6, 6)))
    except RankError as error:
        print(error)
"""


@pytest.mark.slow
def test_the_page_shows_what_a_pool_says_of_a_gpu_that_hangs(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(HANGS)
    done = on_fake_gpus([str(program)], 2, CUDA_FAKE_HANG="1 21")
    said = done.stdout.strip().replace("progress for 3 s", "progress for 10 s")
    said = re.sub(r' \(File "[^"]+", line \d+\)', "", said)  # what plays the GPU is a file of nobody's
    assert said and said in " ".join(HANGS_PAGE.split()), done.stdout + done.stderr[-3000:]


def test_the_flight_recorder_has_the_names_that_the_page_gives():
    """In the PyTorch that is installed, which may be built without NCCL."""
    headers = Path(torch.__file__).parent / "include" / "torch" / "csrc" / "distributed" / "c10d"
    known = "".join((headers / name).read_text() for name in ("FlightRecorder.hpp", "ProcessGroupNCCL.hpp"))
    names = set(re.findall(r"\bTORCH_(?:FR|NCCL)_[A-Z_]+", HANGS_PAGE))
    file_names = {"TORCH_FR_DUMP_TEMP_FILE"}
    settings = {"TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_DESYNC_DEBUG"}
    assert names == {"TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"} | settings | file_names
    assert all(f'"{name}"' in known for name in names - file_names)
    assert '"p2p_seq_id"' in known and "DEFINE_CONSTANT(scheduled_state" in known
    if sys.platform == "linux":
        library = (Path(torch.__file__).parent / "lib" / "libtorch_cpu.so").read_bytes()
        assert all(name.encode() in library for name in file_names)
    reader = Path(torch.__file__).parent / "distributed" / "flight_recorder" / "components" / "types.py"
    assert '"FR_TRACE_VERBOSE_OUTPUT"' in reader.read_text() and "FR_TRACE_VERBOSE_OUTPUT=1 torchfrtrace" in HANGS_PAGE
    assert "torchfrtrace" in {entry.name for entry in entry_points(group="console_scripts")}
    assert "NCCL watchdog timeout" in HANGS_PAGE and "pt_elastic" in inspect.getsource(torch.distributed.run)
    assert re.search(r"NCCLDefaultTimeout =\s+std::chrono::\w+\(10 \* 60 \*", known)


def test_the_page_shows_what_torchfrtrace_says_of_two_ranks_that_both_send(tmp_path, caplog):
    """Of dumps as PyTorch's recorder writes them, with what the reader looks at."""
    done = {"process_group": ("0", "default_pg"), "input_dtypes": ["Float"], "output_dtypes": ["Float"], "is_p2p": True}
    sizes = {"input_sizes": [(1, 64)], "output_sizes": [(1, 64)], "time_created_ns": 0, "collective_seq_id": 0}
    ranks = (
        (("send 0->1", "completed"), ("send 0->1", "started")),
        (("recv 1<-0", "completed"), ("send 1->0", "started")),
    )
    for rank, operations in enumerate(ranks):
        entries = [
            {"record_id": i, "p2p_seq_id": i + 1, "profiling_name": f"nccl:{what}", "state": state, **done, **sizes}
            for i, (what, state) in enumerate(operations)
        ]
        groups = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
        dump = {"version": "2.10", "pg_config": groups, "pg_status": {}, "entries": entries}
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps(dump))
    with pytest.raises(SystemExit):
        fr_trace.main([str(tmp_path), "-p", "rank_", "-j"])
    printed = "\n".join(line.rstrip() for line in caplog.messages[-1].splitlines())
    assert printed.count("send(") == 3 and f"```text\n{printed}\n```" in HANGS_PAGE, printed
    fr_trace.main([str(tmp_path), "-p", "rank_"])
    assert "Culprit rank 1; Error type: SIZE_OR_SYNTAX_MISMATCH" in caplog.text


def test_the_runtime_sets_what_the_pages_say():
    settings = {"CUDA_MODULE_LOADING": "EAGER", "CUDA_DEVICE_MAX_CONNECTIONS": "32", "NCCL_LAUNCH_ORDER_IMPLICIT": "0"}
    assert gpu.ENVIRONMENT == settings
    assert all(name in PAGE for name in settings)
    assert gpu._MOST_CTAS == 4 and "only four of NCCL's blocks" in PAGE and "pplab takes 4 blocks" in HANGS_PAGE


def test_the_page_counts_wires_and_dollars_right():
    (table,) = re.findall(r"^ +GPU0.*\n((?:GPU\d .*\n)+)", PAGE, re.M)
    joined = [line.split()[1:] for line in table.splitlines()]
    crossed = {o: sum(joined[a][b] == "SYS" for a, b in pairwise(o)) for o in ((0, 1, 2, 3), (0, 2, 1, 3))}
    assert list(crossed.values()) == [3, 1]
    assert "order 0, 1, 2, 3 all three" in PAGE and "order 0, 2, 1, 3 one does" in PAGE
    assert Case().dollars_per_hour == 2 and f"eight GPUs cost \\${8 * 9 / 60 * 2:.2f}" in PAGE


@pytest.mark.slow
def test_the_program_on_the_page_sends_around_a_ring(tmp_path):
    """Without a GPU, by gloo; and the shares on the page follow from its quoted figures."""
    assert round(100 * 794.5 / 989) == 80 and round(100 * 234.89 / 300) == 78 and "NVLink's 300 GB/s" in PAGE
    (program,) = re.findall(r"^    ```python\n(.*?)^    ```", PAGE, re.DOTALL | re.MULTILINE)
    (tmp_path / "ring.py").write_text(textwrap.dedent(program).replace("2**25", "2**15"))
    with socket.create_server(("127.0.0.1", 0)) as door:
        port = door.getsockname()[1]
    known = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}", "CUDA_VISIBLE_DEVICES": ""}
    ranks = [
        subprocess.Popen(
            [sys.executable, "ring.py"],
            cwd=tmp_path,
            env=known | {"WORLD_SIZE": "2", "RANK": f"{rank}", "LOCAL_RANK": f"{rank}"},
            text=True,
            stdout=subprocess.PIPE,
        )
        for rank in (0, 1)
    ]
    said = [rank.communicate(timeout=120)[0] for rank in ranks]
    assert [line.partition(",")[0] for line in said] == ["rank 0 got 1", "rank 1 got 0"]


def words(path: str) -> str:
    """A page's or a notebook's text, on one line."""
    text = (ROOT / path).read_text()
    if path.endswith("ipynb"):
        text = " ".join(
            "".join(cell["source"]) for cell in json.loads(text)["cells"] if cell["cell_type"] == "markdown"
        )
    return " ".join(text.split())


def between(found: list[float], form: str = ".2f") -> str:
    return f"{min(found):{form}} to {max(found):{form}}"


def test_what_pages_say_of_the_h100_is_recorded():
    (h100,) = [each for each in results.load(ROOT / "results") if each.data["kind"] == "cuda"]
    bf16, fp32 = (
        {(row["width"], row["tokens"]): row for row in h100.rows("stages") if row["dtype"] == dtype}
        for dtype in ("bf16", "fp32")
    )
    speed = {tokens: f"{row['tflops']['F']:.0f}" for (width, tokens), row in bf16.items() if width == 4096}
    paced = [row for row in bf16.values() if row["pace"] == "GPU"]
    of_f = {kind: between([row["ratios"][f"{kind}/F"][1] for row in paced]) for kind in "BIW"}
    halves = between([row["ratios"]["(I+W)/B"][1] for row in fp32.values() if row["pace"] == "GPU"])
    wide = bf16[4096, 8192]["ms"]
    pinned = [row for row in h100.rows("copies") if row["memory"] == "pinned"]
    copies = [row["slower"] for row in pinned]
    errors = [
        one["error"] for row in h100.rows("predicted") for one in row["schedules"] if one["schedule"] != row["measured"]
    ]
    took = [one["measured_ms"] for row in h100.rows("predicted")[:3] for one in row["schedules"]]
    shared = {
        how: [row["ratio"] for row in h100.rows("slow_down") if row["sharing"] == how] for how in ("mps", "turns")
    }
    traces = Path("tests", "lab", "measuring", "traces")
    steps, told = {}, {}
    for name, other in (("1F1B", "GPipe"), ("GPipe", "1F1B")):
        found = lab.explain(ROOT / traces / f"gpu-{name.lower()}")
        lasted = [step.makespan for step in found.job.timelines]
        steps[name] = f"{sorted(lasted)[1]:.1f} ms"
        row = next(row for row in found.orders if row.what == other)
        told[other] = f"{sum(lasted) / len(lasted) * (1 + row.change):.1f} ms ± {row.error:.1%}".replace("%", " %")
    assert {round(bf16[768, tokens]["ms"]["F"], 1) for tokens in (1024, 8192)} == {1.2}
    assert {width for width, _ in fp32} == {768} and halves == between([row["ratios"]["(I+W)/B"][1] for row in paced])
    assert {round(row["beside_gb_per_s"]) for row in pinned[:2]} == {55}
    assert len(h100.rows("gradients")) == 4 * 19 and not any(row["wrong"] for row in h100.rows("gradients"))
    assert all(row["ended"] for row in h100.rows("nccl")) and round(100 * (max(took) / min(took) - 1)) == 11
    assert [row["agrees"] for row in h100.rows("assumptions")] == [False] + 6 * [True]
    said = {
        "book/gpu.md": [
            f"{speed[1024]} TFLOP/s with 1,024 tokens, {speed[8192]} with 8,192 and {speed[32768]} with 32,768",
            f"$B$ took {of_f['B']} times as long as $F$, $I$ {of_f['I']} times and $W$ {of_f['W']} times",
            f"At width 768, where the GPU set the pace, $I + W$ took {halves} times as long as autograd's own $B$",
            "{:.1f} GB/s out and {:.1f} back".format(*(row["alone_gb_per_s"] for row in pinned[:2])),
            f"{copies[0]:.2f} to {copies[1]:.2f} times as long, or {copies[2]:.2f} times with copies both ways",
            f"each takes {between(shared['mps'])} times as long as alone",
            "in turns {:.2f} and {:.2f} times".format(*shared["turns"]),
            f"errors from {100 * min(errors):.1f} to {100 * max(errors):+.1f} %",
        ],
        "notebooks/03_gpipe.ipynb": [
            f"{speed[1024]} TFLOP/s in microbatches of 1,024 tokens, and {speed[8192]} in those of"
        ],
        "notebooks/08_zero_bubble.ipynb": [
            f"width 768, the two halves as pplab splits them took {halves} times as long as autograd's own $B$",
            f"width 4,096 with 8,192 tokens, $I$ took {wide['I'] / wide['W']:.1f} times as long as $W$",
        ],
        "notebooks/11_balance.ipynb": [
            f"{copies[0]:.2f} to {copies[1]:.2f} times as long",
            f"{copies[2]:.2f} times as long during copies in both",
        ],
        "notebooks/14_profile.ipynb": [
            f"between {-100 * min(errors):.1f} % too short and {100 * max(errors):.1f} % too long",
            f"promises {told['1F1B']} for 1F1B, which took {steps['1F1B']}",
            f"promises {told['GPipe']} for GPipe, which took {steps['GPipe']}",
        ],
    }
    assert [(path, each) for path, lines in said.items() for each in lines if each not in words(path)] == []
    assert len(errors) == 7
