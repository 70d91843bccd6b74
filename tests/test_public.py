"""What a public project has around its code: metadata, a citation, workflows and forms for issues."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from email import message_from_string
from pathlib import Path

import pytest
import unpin
import yaml

import pplab

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
CONFIG = yaml.safe_load((ROOT / "_config.yml").read_text())
CITATION = yaml.safe_load((ROOT / "CITATION.cff").read_text())
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
TARGETS = re.findall(r"^([.\w/]+):", (ROOT / "Makefile").read_text(), re.M)


def test_metadata_citation_and_book_agree():
    (author,) = PROJECT["authors"]
    (cited,) = CITATION["authors"]
    assert author["name"] == cited["name"] == CONFIG["author"]
    assert CITATION["title"] == CONFIG["title"] and CITATION["license"] == PROJECT["license"]
    assert str(CITATION["version"]) == pplab.__version__
    assert CITATION.get("repository-code") == PROJECT.get("urls", {}).get("Repository")


@pytest.mark.slow
def test_an_address_that_is_set_is_in_the_package_metadata(tmp_path):
    """As the comment in pyproject.toml says; and what is there without one makes a package, too."""
    text = (ROOT / "pyproject.toml").read_text()
    assert text.count("\n# urls.Repository = ") + text.count("\nurls.Repository = ") == 1
    for name in ("README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "src" / "pplab", tmp_path / "src" / "pplab", ignore=shutil.ignore_patterns("__pycache__"))
    set_to = re.sub(r"\n(# )?urls.Repository = .*", '\nurls.Repository = "https://example.org/a/b"', text)
    (tmp_path / "pyproject.toml").write_text(set_to)
    (tmp_path / "out").mkdir()
    code = "from setuptools import build_meta; build_meta.prepare_metadata_for_build_wheel('out')"
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, check=True, capture_output=True)
    (made,) = tmp_path.glob("out/*.dist-info/METADATA")
    found = message_from_string(made.read_text())
    assert found["Project-URL"] == "Repository, https://example.org/a/b"
    assert found["Author"] == "The pplab authors" and found["Version"] == pplab.__version__
    assert {"plot", "prove", "run"} == set(found.get_all("Provides-Extra"))
    assert len(found.get_all("Classifier")) > 5 and found["Keywords"]


def commands(path: Path) -> list[str]:
    """What a workflow runs."""
    jobs = yaml.safe_load(path.read_text())["jobs"]
    return [step["run"] for job in jobs.values() for step in job["steps"] if "run" in step]


def test_workflows_call_what_there_is():
    """Targets of make, and files."""
    assert [path.stem for path in WORKFLOWS] == ["book", "newest", "test"]
    for path in WORKFLOWS:
        for command in commands(path):
            for target in re.findall(r"\bmake ([.\w/]+)", command):
                assert target in TARGETS, f"{path.name}: make {target}"
            for file in re.findall(r"\b(?:tools|tests|binder)/[\w./-]*\w|(?<!/)\brequirements.txt\b", command):
                assert (ROOT / file).exists(), f"{path.name}: {file}"
        for job in yaml.safe_load(path.read_text())["jobs"].values():
            assert job["timeout-minutes"] <= 90, "a runner that hangs costs six hours"
    assert all("make test" in commands(path)[-1] for path in WORKFLOWS[1:])


def test_the_published_book_knows_where_it_comes_from():
    jobs = yaml.safe_load(WORKFLOWS[0].read_text())["jobs"]
    job = jobs["build"]
    (built,) = (step for step in job["steps"] if step.get("run") == "make book")
    assert built["env"] == {"PPLAB_REPOSITORY": "${{ github.server_url }}/${{ github.repository }}"}
    (uploaded,) = (step for step in job["steps"] if "upload-pages" in step.get("uses", ""))
    assert uploaded["with"] == {"path": "_build/html"}
    assert {name: job.get("if") for name, job in jobs.items()} == {
        "build": None,
        "publish": "github.ref_type == 'branch'",
        "release": "github.ref_type == 'tag'",
    }


def test_a_release_has_the_book_as_a_zip(tmp_path):
    """Its commands, with what the workflow's artifact has, and a stand-in for gh, which notes what it is told."""
    step = yaml.safe_load(WORKFLOWS[0].read_text())["jobs"]["release"]["steps"][-1]
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "index.html").write_text("the book")
    subprocess.run(["tar", "-cf", "artifact.tar", "-C", "made", "."], cwd=tmp_path, check=True)
    (tmp_path / "gh").write_text('#!/bin/sh\necho "$@" >> told\ntest "$2" != view\n')
    (tmp_path / "zip").write_text(f"#!/bin/sh\n{sys.executable} -m zipfile -c $2 $3\n")
    for name in ("gh", "zip"):
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TAG": "v1"}
    subprocess.run(["sh", "-ec", step["run"]], cwd=tmp_path, env=environment, check=True)
    assert zipfile.ZipFile(tmp_path / "pplab-book.zip").read("pplab-book/index.html") == b"the book"
    told = (tmp_path / "told").read_text().splitlines()
    assert [each.split()[1] for each in told] == ["view", "create", "upload"] and "v1 pplab-book.zip" in told[-1]


def test_workflows_take_the_wheels_that_launch_buttons_take():
    """The command that looks them up finds them. The book is built without torch."""
    for path in WORKFLOWS[1:]:
        (command,) = {each for each in commands(path) if "PIP_EXTRA_INDEX_URL" in each}
        found = subprocess.run(
            ["sh", "-c", command.replace('"$GITHUB_ENV"', "/dev/stdout")],
            cwd=ROOT,
            text=True,
            capture_output=True,
            check=True,
        )
        assert re.fullmatch(r"PIP_EXTRA_INDEX_URL=https://\S+/cpu\n", found.stdout)


def test_the_container_makes_the_environment():
    """Its command finds the wheels for CPUs, and hands them to a target that there is."""
    told = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text())
    command = told["postCreateCommand"].partition("; ")[2]
    assert command.split()[-2:] == ["make", ".venv/ready"] and ".venv/ready" in TARGETS
    done = subprocess.run(
        ["sh", "-c", command.replace("make .venv/ready", "env")], cwd=ROOT, text=True, capture_output=True
    )
    assert re.search(r"^PIP_EXTRA_INDEX_URL=https://\S+/cpu$", done.stdout, re.M)
    image = (ROOT / ".devcontainer" / told["build"]["dockerfile"]).read_text()
    assert f"useradd --create-home {told['remoteUser']}\n" in image
    version = re.search(r"^FROM python:(.+)$", image, re.M)[1]
    assert f'python-version: "{version}"' in WORKFLOWS[0].read_text()


def test_what_reading_takes_is_pinned_with_the_rest():
    lines = (ROOT / "book" / "requirements.txt").read_text().splitlines()
    names = [line for line in lines if not line.startswith(("#", "-"))]
    pinned = (ROOT / "requirements.txt").read_text()
    assert "-c ../requirements.txt" in lines and "jupyter-book" in names and "torch" not in names
    assert all(re.search(rf"^{name}==", pinned, re.M) for name in names)


def test_versions_of_python_are_those_of_the_package():
    job = yaml.safe_load(WORKFLOWS[2].read_text())["jobs"]["test"]
    tested = job["strategy"]["matrix"]["python"]
    assert PROJECT["requires-python"] == f">={tested[0]}"
    assert [f"Programming Language :: Python :: {version}" for version in tested] == [
        each for each in PROJECT["classifiers"] if "Python ::" in each
    ]
    for name in ("README.md", "requirements.txt", "Makefile", "book/how_to_use.md", "book/gpu.md"):
        assert f"Python {tested[0]} to {tested[-1]}" in (ROOT / name).read_text(), name


def test_forms_ask_for_something():
    assert [path.stem for path in FORMS] == ["book", "bug", "question"]
    for path in FORMS:
        form = yaml.safe_load(path.read_text())
        assert form["name"] and form["description"] and form["body"]
        ids = [field["id"] for field in form["body"]]
        assert len(set(ids)) == len(ids) <= 3


def test_pins_are_let_go():
    text = "# one\n\na==1.2\nb_c==3.0.post1  # two == three\nq==1; python_version < '3.13'\njupyter-book==1.0.4\n"
    assert unpin.unpinned(text) == (
        "# one\n\na>=1.2\nb_c>=3.0.post1  # two == three\nq>=1; python_version < '3.13'\njupyter-book<2,>=1.0.4\n"
    )
    with pytest.raises(ValueError, match=r"'a>=1' isn't pinned"):
        unpin.unpinned("a>=1\n")


def test_no_pin_of_the_course_is_left():
    text = (ROOT / "requirements.txt").read_text()
    lines = [line for line in unpin.unpinned(text).splitlines() if line and not line.startswith("#")]
    assert len(lines) == text.count("==") > 100 and not any("==" in line for line in lines)
    assert len(re.findall(r"^uv\b\S*", "\n".join(lines), re.M)) == 1  # which tools/install.py looks for
    assert all(re.search(rf"^{name}<", "\n".join(lines), re.M) for name in unpin.BELOW)
