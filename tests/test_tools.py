"""The tools: what installs the environment, what executes and records the notebooks, and what says how long it took."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import attack
import durations
import execute_notebooks
import install
import nbformat
import psutil
import pytest
import quiet
from jupyter_client.connect import LocalPortCache

import conftest
from pplab.lab import results

ROOT = Path(__file__).parents[1]
BURN = "import time; end = time.process_time() + {}\nwhile time.process_time() < end: pass"


def test_the_chapters_that_take_too_long_are_named():
    said = durations.report({"01_short": 20.4, "02_long": 120.6, "03_longer": 300}).splitlines()
    assert said[1:3] == ["      20 s  01_short", "     121 s  02_long"]
    assert said[-1] == "== WARNING: over 120 s: 02_long (121 s), 03_longer (300 s)"
    assert durations.report({"01_short": 120}).endswith("no chapter takes more than 120 s")


def test_kernels_get_ports_that_the_system_gives_nobody():
    ports = LocalPortCache.instance()  # conftest.py has it so
    chosen = {ports.find_available_port("127.0.0.1") for _ in range(50)}
    assert len(chosen) == 50 and max(chosen) < 32_768
    for port in chosen:
        ports.return_port(port)


def test_uv_is_told_what_pip_was():
    told = install.settings(
        ":env:.find-links='/wheels'\n:env:.quiet='1'\nglobal.cert='/a.pem'\nglobal.find-links='/else'\n"
        "global.extra-index-url='file:///one file:///two'\nglobal.no-index='true'\ndownload.timeout='5'\n"
    )
    options, variables = install.for_uv(told)
    indexes = "--index file:///one --index file:///two --no-index --index-strategy unsafe-best-match"
    assert " ".join(options) == f"--find-links /wheels {indexes}"
    assert variables == {"SSL_CERT_FILE": "/a.pem"}
    assert install.for_uv({}) == ([], {})
    with pytest.raises(ValueError, match="pip's setting only-binary has no equal"):
        install.for_uv({"only-binary": ":all:"})


@pytest.mark.slow
def test_without_uv_pip_installs(tmp_path, monkeypatch, capfd):
    (tmp_path / "none.txt").write_text("uv==0.0.0.dev0  # there is none\n")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    assert install.main(tmp_path / "none.txt") != 0
    said = capfd.readouterr().err
    assert "== not by uv (Command" in said and "No matching distribution found for uv==0.0.0.dev0" in said


def test_what_others_take_is_too_much_from_a_tenth_on():
    cores = psutil.cpu_count()
    start = quiet.Reading(at_s=0, busy_s=1, own_s=1)
    quiet.Reading(at_s=100, busy_s=1 + 70, own_s=1 + 69).check_since(start, "meanwhile")
    quiet.Reading(at_s=0.1, busy_s=1 + quiet.FLOOR_S / 2, own_s=1).check_since(start, "meanwhile")
    with pytest.raises(quiet.TooBusy, match=r"^meanwhile other processes took \d+\.0 s .*, 12% of all cores'"):
        quiet.Reading(at_s=100, busy_s=1 + 12 * cores, own_s=1).check_since(start, "meanwhile")


@pytest.mark.skipif(not quiet.can_tell_own(), reason="only on Linux are ended processes' times known")
def test_what_children_took_is_ones_own_also_when_they_ended():
    start = quiet.Reading.now()
    subprocess.run(
        [sys.executable, "-c", f"import subprocess, sys; subprocess.run([sys.executable, '-c', {BURN.format(0.5)!r}])"]
    )
    now = quiet.Reading.now()
    assert 0.5 <= now.own_s - start.own_s < 5 and now.busy_s - start.busy_s > 0.4


def test_a_gpu_that_computes_is_too_busy(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert quiet.gpu_use() == []
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 0\necho 83\necho '[N/A]'\n")
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setattr(quiet.Reading, "check_since", lambda *_: None)
    with pytest.raises(quiet.TooBusy, match="a GPU was 83 % busy"):
        quiet.check(0)


@pytest.fixture
def others() -> Iterator[None]:
    """Processes of nobody here that keep half of the cores busy."""
    burn = f"subprocess.Popen([sys.executable, '-c', {BURN.format(60)!r}], stdout=subprocess.DEVNULL)"
    start = f"import subprocess, sys; print({burn}.pid)"
    count = -(-os.cpu_count() // 2)
    pids = [int(subprocess.check_output([sys.executable, "-c", start])) for _ in range(count)]
    yield
    for pid in pids:
        os.kill(pid, signal.SIGKILL)


def notebook(path: Path, code: str) -> Path:
    nbformat.write(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)]), path)
    return path


@pytest.mark.slow
def test_a_notebook_is_executed_and_recorded(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(quiet, "FLOOR_S", 999)
    path = notebook(tmp_path / "a.ipynb", "import sys\nprint(1 + 1)\nprint(3, file=sys.stderr)")
    assert execute_notebooks.main([str(path)]) == 0
    (cell,) = nbformat.read(path, as_version=4).cells
    assert [output.text for output in cell.outputs] == ["2\n"] and cell.execution_count == 1
    assert "a.ipynb ..." in capsys.readouterr().out


def test_cleaning_folds_what_the_page_hides_and_drops_what_an_editor_left(tmp_path):
    tags = {"a": ["hide-input", "nbval-ignore-output"], "b": ["answer"], "c": [], "d": ["remove-input"]}
    left = {"jupyter": {"source_hidden": True, "outputs_hidden": False}, "trusted": True}
    cells = [nbformat.v4.new_code_cell("1", id=name, metadata={"tags": t} | left) for name, t in tags.items()]
    cells[0].metadata["figure"] = {"title": "What it shows."}
    cells += [nbformat.v4.new_markdown_cell("*Where.*", metadata={"tags": ["elsewhere"], "editable": False})]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "a.ipynb")
    assert execute_notebooks.main(["--clean", str(tmp_path / "a.ipynb")]) == 0
    assert [cell.metadata for cell in nbformat.read(tmp_path / "a.ipynb", as_version=4).cells] == [
        {"tags": tags["a"], "jupyter": {"source_hidden": True}, "figure": {"title": "What it shows."}},
        {"tags": tags["b"], "jupyter": {"outputs_hidden": True}},
        {},
        {"tags": tags["d"], "jupyter": {"source_hidden": True}},
        {"tags": ["elsewhere"]},
    ]


@pytest.mark.slow
@pytest.mark.skipif(not quiet.can_tell_own(), reason="only on Linux is a run watched")
@pytest.mark.parametrize("when", ["before anything ran,", "while cell 1 ran,"])
def test_nothing_is_recorded_on_a_busy_machine(tmp_path, monkeypatch, capsys, others, when):
    if when.startswith("while"):
        monkeypatch.setattr(quiet, "check", lambda: None)
    paths = [notebook(tmp_path / name, "import time; time.sleep(2)") for name in ("a.ipynb", "b.ipynb")]
    before = [path.read_bytes() for path in paths]
    assert execute_notebooks.main([str(path) for path in paths]) == 1
    said = capsys.readouterr().out
    assert f"== {when} other processes took" in said and said.endswith("== not recorded: a.ipynb b.ipynb\n")
    assert [path.read_bytes() for path in paths] == before


@pytest.mark.slow
def test_attacks_are_recorded_one_after_the_other_and_those_not_repeated_are_kept(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    out = tmp_path / "attacks.json"
    for name in ("saves", "damage"):
        assert attack.main([name, "--part", "0.01", "--out", str(out)]) == 0
    (recording,) = results.load(tmp_path)
    assert [row["tried"] for row in recording.rows("saves")] == [2]
    assert all(row["tried"] == 120 and row["wrong"] == 0 for row in recording.rows("damage"))
    assert "== damage: 120 tries of each" in capsys.readouterr().out


@pytest.fixture
def shared(tmp_path) -> SimpleNamespace:
    """The configuration of a process that runs tests, as far as it is asked here."""
    return SimpleNamespace(stash={conftest.SHARED: tmp_path, conftest.ROOM: None})


@pytest.mark.parametrize(
    ("mark", "right_at", "tries"), [("timed", 1, 1), ("timed", 2, 2), ("timed", 9, 2), ("slow", 9, 0)]
)
def test_tests_that_measure_times_are_tried_again(monkeypatch, shared, mark, right_at, tries):
    """Three times, the last by pytest itself, and no others; what isn't an assertion is an error at once."""
    done = []

    def body(size):
        done.append(size)
        assert len(done) >= right_at

    named = SimpleNamespace(argnames=("size",))
    item = SimpleNamespace(funcargs={"size": 3, "other": 0}, _fixtureinfo=named, obj=body, config=shared)
    item.get_closest_marker = lambda name: name == mark or None
    monkeypatch.setattr(conftest, "PATIENCE_S", 0)
    assert conftest.pytest_pyfunc_call(item) is (True if right_at <= tries else None)
    assert done == [3] * tries


def test_a_test_that_is_tried_again_is_alone(shared):
    """It waits for the tests of two others. One of them has a further test, which waits for it, and a test that wants
    to be alone, too."""
    others, said, last = [SimpleNamespace(stash={**shared.stash}) for _ in range(2)], [], threading.Event()
    ends, inside = [threading.Event() for _ in others], threading.Barrier(3)

    def run(config, end, name):
        with conftest.beside_others(config):
            inside.wait()
            end.wait()
            said.append(name)
        if name == "first":
            with conftest.beside_others(config):
                said.append("further")
                last.set()
                conftest.be_alone(config)
                said.append("further, alone")

    with conftest.beside_others(shared):
        running = [
            threading.Thread(target=run, args=each, daemon=True)
            for each in zip(others, ends, ("first", "second"), strict=True)
        ]
        for each in running:
            each.start()
        inside.wait()
        threading.Timer(0.2, ends[0].set).start()
        threading.Timer(0.5, ends[1].set).start()
        conftest.be_alone(shared)
        conftest.be_alone(shared)  # it is, and waits for nobody
        assert said == ["first", "second"] and not last.wait(0.2)
        said.append("alone")
    for each in running:
        each.join()
    assert said == ["first", "second", "alone", "further", "further, alone"]


@pytest.mark.slow
def test_several_processes_need_no_cache_to_run_the_tests():
    """Where a checkout can't be written to, for one."""
    command = ["-m", "pytest", "tests/lab/planning/test_fsdp.py", "-q", "-n", "2", "-p", "no:cacheprovider"]
    done = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "INTERNALERROR" not in done.stdout, done.stdout


@pytest.mark.slow
def test_what_is_skipped_for_want_of_a_browser_is_counted_at_the_end_and_what_to_install(tmp_path):
    """On a slim Debian the node that comes with Playwright finds no libatomic."""
    node = tmp_path / "node"
    node.write_text('#!/bin/sh\necho "$0: error while loading shared libraries: libatomic.so.1" >&2\nexit 127\n')
    node.chmod(0o755)
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "tests/pages/test_editor.py"]
    without = {**os.environ, "PLAYWRIGHT_NODEJS_PATH": str(node)}
    done = subprocess.run(command, cwd=ROOT, env=without, text=True, capture_output=True, timeout=120)
    *_, counted, closing = done.stdout.splitlines()
    assert done.returncode == 0, done.stdout
    assert closing.startswith("2 skipped in ")
    why = "Playwright doesn't start (node: error while loading shared libraries: libatomic.so.1)"
    assert counted.startswith(f"2 skipped: {why}: apt-get install libatomic1 chromium (on Ubuntu: ")


@pytest.mark.slow
def test_notebooks_are_compared_on_another_processor_than_tests(tmp_path):
    path = notebook(tmp_path / "a.ipynb", "import torch\nassert torch.backends.cpu.get_cpu_capability() == 'DEFAULT'")
    (tmp_path / "test_a.py").write_text("import os\ndef test(): assert 'ATEN_CPU_CAPABILITY' not in os.environ\n")
    quick = "tests/test_tools.py::test_the_chapters_that_take_too_long_are_named"  # brings tests/conftest.py
    command = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", "-p", "no:cacheprovider", "--nbval", quick]
    environment = {name: value for name, value in os.environ.items() if name != "ATEN_CPU_CAPABILITY"}
    done = subprocess.run([*command, path, tmp_path], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert " 3 passed" in done.stdout, done.stdout


@pytest.mark.slow
def test_a_process_that_ends_in_a_test_fails_it_and_the_others_run(tmp_path):
    """As one does that hangs, after `faulthandler_timeout`."""
    (tmp_path / "pytest.ini").touch()
    for letter in "abcdef":
        (tmp_path / f"test_{letter}.py").write_text("def test_1(): pass\n\n\ndef test_2(): pass\n")
    (tmp_path / "test_e.py").write_text("""
import os

def test_ends():
    if not os.path.exists("ended"):
        open("ended", "w")
        os._exit(1)
""")
    path = os.pathsep.join([str(ROOT / "tests"), str(ROOT / "tools"), str(ROOT / "src")])
    command = [sys.executable, "-m", "pytest", "-q", "-p", "conftest", "-n", "2", "--dist", "loadfile"]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "PYTHONPATH": path}, text=True, capture_output=True, timeout=120
    )
    assert "1 failed, 11 passed in" in done.stdout.splitlines()[-1], done.stdout + done.stderr
