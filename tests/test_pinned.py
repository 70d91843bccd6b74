"""book/_live/pinned.zip, Python for the book's pages, and the tool that makes it."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import shutil
import tarfile
from zipfile import ZipFile

import pin_python
import pytest

LOCK = json.loads((pin_python.RECIPE / "package-lock.json").read_text())["packages"]
NOT_INSIDE = {"esbuild", "ws", "@types/emscripten"}  # esbuild makes the editor; Pyodide wants the others in node only
FILES = {"pyodide.js", "pyodide.asm.js", "pyodide.asm.wasm", "stdlib.zip", "pyodide-lock.json", "editor.js"}


@pytest.fixture(scope="module")
def pinned() -> dict[str, bytes]:
    return pin_python.unpacked(pin_python.PINNED.read_bytes())


def test_the_file_is_the_one_that_the_repository_names(pinned):
    named, name = pin_python.PINNED.with_suffix(".sha256").read_text().split()
    assert (named, name) == (hashlib.sha256(pin_python.PINNED.read_bytes()).hexdigest(), pin_python.PINNED.name)
    assert set(pinned) == FILES | {"LICENSES.txt"}
    assert pin_python.PINNED.stat().st_size < 7e6


def test_the_library_is_compiled_for_the_python_beside_it(pinned):
    """3571 is CPython's magic number of 3.13, and a 1 after it tells Python not to look for the source (PEP 552)."""
    assert json.loads(pinned["pyodide-lock.json"])["info"]["python"].startswith("3.13.")
    with ZipFile(io.BytesIO(pinned["stdlib.zip"])) as library:
        heads = {library.read(name)[:8] for name in library.namelist() if name.endswith(".pyc")}
        assert heads == {(3571).to_bytes(2, "little") + b"\r\n" + (1).to_bytes(4, "little")}
        assert not [name for name in library.namelist() if name.endswith(".py")]


def test_the_licence_of_each_package_is_there(pinned):
    licenses = pinned["LICENSES.txt"].decode()
    names = {path.removeprefix("node_modules/"): told for path, told in LOCK.items() if path}
    inside = {name: told for name, told in names.items() if name not in NOT_INSIDE and not name.startswith("@esbuild/")}
    bundled = {name: told for name, told in inside.items() if name != "pyodide"}
    assert len(bundled) == licenses.count(" (editor.js): MIT\n")
    for name, told in bundled.items():
        assert f"{name} {told['version']} (editor.js): {told['license']}\n" in licenses
    assert inside["pyodide"]["license"] == "MPL-2.0" and "Mozilla Public License Version 2.0" in licenses


@pytest.mark.skipif(not shutil.which("npm"), reason="npm not found")
def test_another_download_is_refused(tmp_path, monkeypatch, capfd):
    """The package lies beside the lock, which names another file's checksum: npm needs no network to see it."""
    recipe = tmp_path / "recipe"
    recipe.mkdir()
    (tmp_path / "package.json").write_text('{"name": "thing", "version": "1.0.0"}')
    with tarfile.open(recipe / "thing.tgz", "w:gz") as packed:
        packed.add(tmp_path / "package.json", "package/package.json")
    expected = "sha512-" + base64.b64encode(hashlib.sha512(b"another file").digest()).decode()
    root = {"dependencies": {"thing": "file:thing.tgz"}}
    thing = {"version": "1.0.0", "resolved": "file:thing.tgz", "integrity": expected}
    lock = {"lockfileVersion": 3, "packages": {"": root, "node_modules/thing": thing}}
    (recipe / "package.json").write_text(json.dumps(root))
    (recipe / "package-lock.json").write_text(json.dumps(lock))
    monkeypatch.setattr(pin_python, "RECIPE", recipe)
    with pytest.raises(SystemExit, match=r"npm failed, for the reason above: pinned\.zip is as it was"):
        pin_python.collected(tmp_path / "folder")
    assert f"wanted {expected} but got sha512-" in capfd.readouterr().err


def test_what_makes_it_must_be_there(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match=r"node 20 or newer: node and npm and npx not found"):
        pin_python.collected(tmp_path / "folder")


def test_the_same_files_are_the_same_bytes(monkeypatch):
    files = {"a": b"first", "b": b"second"}
    made = pin_python.archive(files)
    monkeypatch.setattr("time.time", lambda: 2e9)
    assert pin_python.archive(files) == made and pin_python.unpacked(made) == files
