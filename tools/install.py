"""Install a file of requirements into the environment whose Python runs this.

python tools/install.py requirements.txt

It uses uv, in the version that the file pins, which fetches, unpacks and compiles on all cores (on two of them it takes
a minute, and pip four). It uses pip where uv can't be had, or where pip has a setting without an equal in uv. uv
doesn't read pip's settings (indexes, certificates), so they are passed to it.
"""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
SAME = {  # a setting of pip's: uv's option
    "index-url": "--default-index",
    "extra-index-url": "--index",
    "find-links": "--find-links",
    "constraint": "--constraint",
    "trusted-host": "--allow-insecure-host",
}
VARIABLES = {"cert": "SSL_CERT_FILE", "timeout": "UV_HTTP_TIMEOUT", "default-timeout": "UV_HTTP_TIMEOUT"}
NO_MATTER = {"disable-pip-version-check", "no-input", "no-color", "progress-bar", "quiet", "verbose", "retries"} | {
    "cache-dir",
    "no-cache-dir",
    "root-user-action",
    "prefer-binary",
}


def main(requirements: Path) -> int:
    """Install, and return the exit status."""
    try:
        options, variables = for_uv(settings(_output([*PIP, "config", "list"])))
        subprocess.run([*PIP, "install", "--quiet", "uv", "--constraint", str(requirements)], check=True)
        uv = [sys.executable, "-m", "uv", "pip", "install", "--python", sys.executable, "--compile-bytecode"]
        subprocess.run([*uv, *options, "-r", str(requirements)], check=True, env={**variables, **os.environ})
        return 0
    except (ValueError, subprocess.CalledProcessError) as problem:
        print(f"== not by uv ({problem}), so by pip, which takes some minutes", file=sys.stderr)
    return subprocess.run([*PIP, "install", "-r", str(requirements)]).returncode


def _output(command: Sequence[str]) -> str:
    return subprocess.run(command, check=True, text=True, stdout=subprocess.PIPE).stdout


def settings(listed: str) -> dict[str, str]:
    """pip's settings, from what `pip config list` prints. The environment has priority over files, and `install` over
    all."""
    found = {}
    for section in ("global", "install", ":env:"):
        for name, value in re.findall(rf"^{section}\.([\w-]+)=(.*)$", listed, re.M):
            found[name] = ast.literal_eval(value)
    return found


def for_uv(told: dict[str, str]) -> tuple[list[str], dict[str, str]]:
    """uv's options, and the variables of its environment, that do the same.

    Raises ValueError where uv has no equal.
    """
    options = []
    for name, value in told.items():
        if name in SAME:
            options += [part for each in value.split() for part in (SAME[name], each)]
        elif name == "no-index":
            options += ["--no-index"] * (value.lower() in ("1", "true", "yes", "on"))
        elif name not in VARIABLES and name not in NO_MATTER:
            raise ValueError(f"pip's setting {name} has no equal")
    if "extra-index-url" in told:  # pip takes the best version of all indexes, uv that of the first with the name
        options += ["--index-strategy", "unsafe-best-match"]
    return options, {VARIABLES[name]: value for name, value in told.items() if name in VARIABLES}


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
