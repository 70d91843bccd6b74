"""Make book/_live/pinned.zip, which is Python for the book's pages. Do it once or twice a year, with node, npm and a
network.

Its parts are listed in tools/pinned/package-lock.json by version and checksum. npm refuses anything else, and prints
what it expected. The same versions give the same files, byte by byte, and `--check` tells whether they still do.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "tools" / "pinned"
PINNED = ROOT / "book" / "_live" / "pinned.zip"
AS_THEY_ARE = ("pyodide.asm.js", "pyodide.asm.wasm")
WHEN = (1980, 1, 1, 0, 0, 0)  # of every file in it


def main() -> int:
    """Make the file, or compare with it, and return the exit status."""
    with tempfile.TemporaryDirectory() as folder:
        made = archive(collected(Path(folder)))
    checksum = hashlib.sha256(made).hexdigest()
    if "--check" in sys.argv:
        same = unpacked(made) == unpacked(PINNED.read_bytes())  # another zlib packs the same in other bytes
        print(f"{PINNED.name} is {'what' if same else 'not what'} tools/pinned makes: {checksum}")
        return not same
    PINNED.write_bytes(made)
    PINNED.with_suffix(".sha256").write_text(f"{checksum}  {PINNED.name}\n")
    print(f"{PINNED.relative_to(ROOT)}: {len(made) / 1e6:.2f} MB, {checksum}")
    return 0


def collected(folder: Path) -> dict[str, bytes]:
    """The files of the archive by name, made in an empty folder."""
    shutil.copytree(RECIPE, folder, dirs_exist_ok=True)
    pyodide = folder / "node_modules" / "pyodide"

    def run(*command: str) -> None:
        if subprocess.run(command, cwd=folder).returncode:
            raise SystemExit(f"{command[0]} failed, for the reason above: {PINNED.name} is as it was")

    if missing := [name for name in ("node", "npm", "npx") if not shutil.which(name)]:
        raise SystemExit(f"{PINNED.name} is made with node 20 or newer: {' and '.join(missing)} not found")
    run("npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund", "--loglevel=error")
    run("node", "library.mjs", str(pyodide), "stdlib.zip")
    how = "--bundle --minify --format=iife --global-name=pplabEditor --legal-comments=none --log-level=warning"
    run("npx", "esbuild", "editor.mjs", *how.split(), "--outfile=editor.js", "--metafile=bundled.json")
    unmapped = re.sub(r"^//# sourceMappingURL=.*$", "", (pyodide / "pyodide.js").read_text(), flags=re.M)
    lock = json.loads((pyodide / "pyodide-lock.json").read_text())
    bundled = json.loads((folder / "bundled.json").read_text())["inputs"]
    return {
        **{name: (pyodide / name).read_bytes() for name in AS_THEY_ARE},
        "pyodide.js": unmapped.encode(),  # whose map isn't there
        "pyodide-lock.json": json.dumps(lock | {"packages": {}}).encode(),
        "stdlib.zip": (folder / "stdlib.zip").read_bytes(),
        "editor.js": (folder / "editor.js").read_bytes(),
        "LICENSES.txt": licenses(folder, bundled).encode(),
    }


def licenses(folder: Path, bundled: dict[str, object]) -> str:
    """The licences of all that is inside: those in licenses.txt and of each package of the editor's bundle."""
    files = [path.split("/") for path in bundled if path.startswith("node_modules/")]
    packages = {Path(*parts[: 3 if parts[1].startswith("@") else 2]) for parts in files}
    texts = [(folder / "licenses.txt").read_text()]
    for package in sorted(packages):
        told = json.loads((folder / package / "package.json").read_text())
        head = f"{told['name']} {told['version']} (editor.js): {told['license']}"
        text = (folder / package / "LICENSE").read_text().strip()
        texts.append("\n".join(["=" * 100, head, "=" * 100, "", text, ""]))
    return "\n".join(texts)


def unpacked(packed: bytes) -> dict[str, bytes]:
    """The files of an archive by name."""
    with zipfile.ZipFile(io.BytesIO(packed)) as given:
        return {name: given.read(name) for name in given.namelist()}


def archive(files: dict[str, bytes]) -> bytes:
    """A zip of the files, the same bytes for the same files."""
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as target:
        for name, content in files.items():
            target.writestr(zipfile.ZipInfo(name, WHEN), content, zipfile.ZIP_DEFLATED, 9)
    return made.getvalue()


if __name__ == "__main__":
    sys.exit(main())
