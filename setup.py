"""Add the description of the package index to pyproject.toml: the README, as it reads outside of a clone."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def description() -> str:
    """The README with absolute links to the repository that `project.urls` names.

    Without one, images are left out and links to files become words.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    readme = (ROOT / "README.md").read_text()
    home = project.get("urls", {}).get("Repository")
    if home is None:
        readme = re.sub(r"^!\[.*\n\n", "", readme, flags=re.MULTILINE)
        return re.sub(r"\[([^\]]*)\]\((?!https://)[^)]*\)", r"\1", readme)
    readme = re.sub(r"(!\[[^\]]*\]\()(?!https://)", rf"\1{home}/raw/main/", readme)
    return re.sub(r"((?<!!)\[[^\]]*\]\()(?!https://)", rf"\1{home}/blob/main/", readme)


if __name__ == "__main__":
    setup(long_description=description(), long_description_content_type="text/markdown")
