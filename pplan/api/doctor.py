"""What of pplan works on this machine, and what to install for the rest."""

from __future__ import annotations

import os
import platform
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Literal

from ..cost_models.document import Document, Record
from ..cost_models.quantities import format_bytes, format_count
from ..cost_models.runtime import RUNTIMES
from .provenance import installed

State = Literal["ok", "missing", "optional", "note"]
EXTRAS = {
    **{
        row.package: (row.package, f"pplan check --runtime {row.package}")
        for row in RUNTIMES.values()
        if row.package
    },
    "transformers": ("transformers", "models by the name hf:..."),
    "distributed": ("dask", "sweeps on a Dask cluster"),
    "ray": ("ray", "sweeps on a Ray cluster"),
}
"""By package, pplan's extra that installs it, and what it is for."""


class Finding(Record):
    """A thing that was looked at, and, where something is to be done, the command for it."""

    subject: str
    state: State
    text: str
    advice: str = ""


class Diagnosis(Document):
    """All that was looked at."""

    kind: ClassVar[str] = "diagnosis"

    findings: list[Finding]

    @property
    def works(self) -> bool:
        """Whether nothing is missing that pplan needs."""
        return all(finding.state != "missing" for finding in self.findings)


def examine_machine() -> Diagnosis:
    """Versions, devices, links, runtimes and the cache of this machine."""
    return Diagnosis(
        findings=[*_versions(), *_devices(), *_runtimes(), *_cache()],
    )


def _versions() -> Iterator[Finding]:
    yield Finding(
        subject="pplan", state="ok", text=f"{installed('pplan')}, Python {platform.python_version()}"
    )
    for package in ("torch", "torchvision"):
        version = installed(package)
        if version is None:
            yield Finding(
                subject=package,
                state="missing",
                text="not installed: nothing can be profiled or checked",
                advice=f"pip install {package}",
            )
        else:
            yield Finding(subject=package, state="ok", text=version)


def _devices() -> Iterator[Finding]:
    if installed("torch") is None:
        return
    from ..profiler.local_machine import have_direct_access, list_backends, list_devices, versions

    for word, name, memory in list_devices():
        free = "" if memory is None else f", {format_bytes(memory)}{' free' if word == 'cpu' else ''}"
        cores = f", {format_count(len(os.sched_getaffinity(0)), 'core')}" if word == "cpu" else ""
        yield Finding(subject=word, state="ok", text=f"{name}{cores}{free}")
    made_by = versions()
    if len(list_devices()) == 1:
        text = "none that torch can use; profiles of the CPU, or estimates"
        if made_by.cuda is None:
            yield Finding(
                subject="GPU",
                state="optional",
                text=f"{text}: this torch is built without CUDA",
                advice="pplan profile MODEL --device analytic:h100",
            )
        else:
            driver = made_by.driver or "no NVIDIA driver"
            yield Finding(
                subject="GPU",
                state="optional",
                text=f"{text}: torch has CUDA {made_by.cuda}, the machine {driver}",
                advice="pplan profile MODEL --device analytic:h100",
            )
    direct = have_direct_access()
    if direct is not None:
        text = (
            "GPUs 0 and 1 read each other's memory directly" if direct else "GPUs 0 and 1 go through the host"
        )
        yield Finding(
            subject="links",
            state="note",
            text=f"{text}; not measured",
            advice="torchrun --nproc-per-node 2 --no-python pplan machine measure links",
        )
    yield Finding(subject="backends", state="ok", text=", ".join(list_backends()) or "none")


def _runtimes() -> Iterator[Finding]:
    for package, (_, purpose) in EXTRAS.items():
        command = missing_extra(package)
        if command is not None:
            yield Finding(
                subject=package,
                state="optional",
                text=f"not installed; for {purpose}",
                advice=command,
            )
        else:
            yield Finding(
                subject=package, state="ok", text=f"{installed(package) or 'installed'}; for {purpose}"
            )


def missing_extra(package: str) -> str | None:
    """The command that installs a package of `EXTRAS` that is not here; None of any other."""
    if package not in EXTRAS or find_spec(package) is not None:
        return None
    return f'pip install "pplan[{EXTRAS[package][0]}]"'


def _cache() -> Iterator[Finding]:
    """The folder of profiles: whether it can be written to."""
    if installed("torch") is None:
        return
    from ..profiler.cache import cache_folder

    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except (OSError, RuntimeError) as error:
        yield Finding(
            subject="cache",
            state="note",
            text=f"cannot be written to ({error}): profiles are measured anew every time",
            advice="export PPLAN_CACHE=FOLDER",
        )
        return
    files = [path for path in Path(folder).glob("*") if path.is_file()]
    size = format_bytes(sum(path.stat().st_size for path in files))
    yield Finding(subject="cache", state="ok", text=f"{folder}: {format_count(len(files), 'file')}, {size}")
