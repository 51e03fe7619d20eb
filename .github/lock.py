"""Writes requirements.lock from a report of pip, and the lower bounds of pyproject.toml as pins.

pip install --dry-run --ignore-installed --report report.json .
python .github/lock.py report.json > .github/requirements.lock
python .github/lock.py --lowest > lowest.txt
"""

from __future__ import annotations

import json
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

HEADING = """\
# What pplan needs, on Linux x86-64 with Python 3.11, with the hash of every file: made by
#   pip install --dry-run --ignore-installed --report report.json .
# and `.github/lock.py report.json`. CI audits and installs exactly these.
"""


def locked(report: Path) -> Iterator[str]:
    """One line a package, and one its hash."""
    installs = json.loads(report.read_text(encoding="utf-8"))["install"]
    for own in sorted(installs, key=lambda own: own["metadata"]["name"].lower()):
        if "archive_info" not in own["download_info"]:
            continue  # pplan itself
        digest = own["download_info"]["archive_info"]["hashes"]["sha256"]
        yield f"{own['metadata']['name'].lower()}=={own['metadata']['version']} \\"
        yield f"    --hash=sha256:{digest}"


def lowest() -> Iterator[str]:
    """The least version of each dependency that pyproject.toml allows."""
    project = tomllib.loads(Path(__file__).parents[1].joinpath("pyproject.toml").read_text(encoding="utf-8"))
    for dependency in project["project"]["dependencies"]:
        name, _, version = dependency.partition(">=")
        yield f"{name}=={version}"


if __name__ == "__main__":
    if sys.argv[1:] == ["--lowest"]:
        print("\n".join(lowest()))
    else:
        print(HEADING + "\n" + "\n".join(locked(Path(sys.argv[1]))))
