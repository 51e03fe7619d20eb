"""The cache: finished profiles and the journals of unfinished ones, in a folder of the user's.

Both are found by what was measured (see fingerprint.py), never by a name.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import filelock
import platformdirs

from ..cost_models.document import Record
from ..cost_models.errors import FileError
from ..cost_models.text_files import is_unchanged, read_text, write_whole
from .fingerprint import fingerprint
from .journal import Journal
from .measurement_target import MeasurementTarget
from .profile_file import Profile
from .profile_warnings import misses_whole

SUPERUSER = 0


def cache_folder() -> Path:
    """$PPLAN_CACHE, else where the platform keeps caches: ~/.cache/pplan or in $XDG_CACHE_HOME on Linux.

    Raises RuntimeError without a home.
    """
    folder = os.environ.get("PPLAN_CACHE")
    if folder:
        return Path(folder)
    cache = platformdirs.user_cache_path("pplan", appauthor=False)
    if not cache.is_absolute():
        raise RuntimeError("the user has no home directory")
    return cache


class Request(Record):
    """How much of a model was to be measured."""

    sizes: tuple[int, ...] | None
    budget_seconds: float
    rounds: int | None
    parts: bool
    memory_bytes: int | None

    def answers(self, other: Request) -> bool:
        """Whether what was measured for this is good enough for `other`: the same, and no longer."""
        longer = other.budget_seconds > self.budget_seconds and other.rounds is None
        return not longer and self == other.model_copy(update={"budget_seconds": self.budget_seconds})


class StoredProfile(Profile):
    """A profile in the cache."""

    kind: ClassVar[str] = "profile"

    request: Request


@dataclass(frozen=True)
class ProfileCache:
    """Takes profiles from the folder and puts them there. `folder` None: nothing is stored.

    `resume`: an interrupted profile is continued. `remark` is told what a user should know.
    """

    folder: Path | None
    resume: bool = False
    remark: Callable[[str], None] = lambda _: None

    @classmethod
    def of_user(cls, *, cache: bool, resume: bool, remark: Callable[[str], None] | None) -> ProfileCache:
        """In the user's folder, which is made; to resume is to keep."""
        tell = remark or (lambda _: None)
        if not (cache or resume):
            return cls(None)
        try:
            folder = cache_folder()
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except (OSError, RuntimeError) as error:
            tell(f"Nothing is kept for a later run: {error}")
            return cls(None)
        return cls(folder, resume, tell)

    def profile(
        self,
        subject: MeasurementTarget,
        request: Request,
        measure: Callable[[Journal | None], Profile],
        *,
        way: str = "",
    ) -> Profile:
        """The one that is kept, or what `measure` makes.

        `way`: another way of measuring the same, of which there is no journal.
        """
        if self.folder is None:
            return measure(None)
        key = fingerprint(subject) + way
        path = self.folder / f"{key}.profile.json"
        stored = self._stored(path, request)
        if stored is not None:
            loaded = subject.loaded
            entry = {
                "model": loaded.name,
                "classes": loaded.classes,
                "settings": loaded.settings_in_json,
            }
            return stored.model_copy(update=entry)
        if way:
            profile = measure(None)
            self._store(path, profile, request)
            return profile
        journal = self._journal(self.folder / f"{key}.journal", key, len(subject.chain))
        done = False
        try:
            profile = measure(journal)
            self._store(path, profile, request)
            done = True
        finally:
            if journal is not None and (done or not journal.is_worth_keeping):
                journal.remove()
            elif journal is not None:
                journal.close()
        return profile

    def _stored(self, path: Path, request: Request) -> Profile | None:
        """What cannot be read, was edited, or is of another user, counts as not there."""
        try:
            text = read_text(path, "profile")
            if not is_unchanged(text) or not _is_own(path):
                return None
            stored = StoredProfile.parse(text, str(path))
            profile = Profile.parse(text, str(path))
        except (FileError, OSError):
            return None
        if not stored.request.answers(request) or misses_whole(profile):
            return None
        self.remark(f"Taken from the cache of {profile.made_by.time}; `cache=False` measures anew")
        return profile

    def _journal(self, path: Path, key: str, layers: int) -> Journal | None:
        try:
            journal = Journal.open(path, key, layers, resume=self.resume)
        except filelock.Timeout:
            self.remark("Another process measures the same: this one keeps no journal for `resume`")
            return None
        except OSError as error:
            self.remark(f"No journal is kept for `resume`: {error}")
            return None
        if journal.passes:
            self.remark(f"Continuing an interrupted profile: {journal.passes} passes of it are kept")
        elif self.resume:
            self.remark("There is no interrupted profile of this to resume: measuring from the beginning")
        elif journal.passes_in_file:
            self.remark(
                f"An interrupted profile of this, of {journal.passes_in_file} passes, is begun anew; "
                "`resume` would have continued it"
            )
        return journal

    def _store(self, path: Path, profile: Profile, request: Request) -> None:
        """Not where the layers do not add up to the model: measuring again may do better."""
        if misses_whole(profile):
            self.remark(
                "Not put into the cache, a later run measures anew: the layers do not add up to the model"
            )
            return
        stored = StoredProfile.model_validate({**profile.model_dump(by_alias=True), "request": request})
        with suppress(OSError):
            path.unlink()  # It was no profile that could be taken.
        try:
            write_whole(path, stored.to_json(), force=True)
        except FileError as error:
            self.remark(f"Not put into the cache: {error.what}")


def _is_own(path: Path) -> bool:
    """Whether the file is this user's. Raises OSError."""
    return not hasattr(os, "geteuid") or path.stat().st_uid in (os.geteuid(), SUPERUSER)
