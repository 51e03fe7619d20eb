"""A plan as one HTML page, to be looked at and sent on."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ..cost_models.errors import FileError, UsageError
from ..cost_models.text_files import read_text, sha256, write_whole
from ..planner.explanation.explanation import Explanation
from ..planner.objectives.frontier import Frontier
from ..planner.plan_file import Plan
from ..profiler.profile_file import Profile
from ..runtimes.checking.check_report import Check
from .explain import explain
from .load import as_plan, check_layers, profile_and_reference
from .machine import planned_machine
from .page.page_content import PageSources, page_content
from .page.render import render_page


@dataclass(frozen=True)
class HtmlReport:
    """The text of the page."""

    html: str

    def save(self, path: str | Path, *, force: bool) -> None:
        """Writes it; an existing file is replaced only with `force`. Raises FileError."""
        write_whole(Path(path), self.html, force=force)

    def _repr_html_(self) -> str:
        """Of a notebook: the page in a frame of its own."""
        from html import escape

        return f'<iframe srcdoc="{escape(self.html)}" width="100%" height="800"></iframe>'


def report(
    plan: Plan | str | Path,
    profile: Profile | str | Path | None = None,
    *,
    frontier: Frontier | str | Path | None = None,
    check: Check | str | Path | None = None,
    explanation: Explanation | bool = False,
) -> HtmlReport:
    """`plan` as one HTML page that needs no network: the answer, the cuts (which can be moved), the timeline,
    memory, comparisons, layers, and how the numbers were made.

    `plan`, `profile`, `frontier` and `check` may be the paths of their files. Without the profile that the
    plan was made from the page has no timeline and no layers, and says so. `explanation`: what
    `pplan.explain` returns, or True to compute it.

    Raises UsageError (a profile of other layers, an explanation without the profile), FileError.
    """
    folder = Path(plan).parent if isinstance(plan, str | Path) else Path()
    name = Path(plan).name if isinstance(plan, str | Path) else ""
    document = as_plan(plan)
    sources = PageSources(
        document,
        name,
        frontier=Frontier.load(frontier) if isinstance(frontier, str | Path) else frontier,
        check=Check.load(check) if isinstance(check, str | Path) else check,
        explanation=explanation if isinstance(explanation, Explanation) else None,
    )
    if profile is None:
        if explanation is True:
            raise UsageError("explanation: needs the plan's profile", "Give `profile`.")
        return HtmlReport(render_page(page_content(sources)))
    measured, reference = profile_and_reference(profile, "", "")
    check_layers(document, reference)
    machine, profiles = planned_machine(document, measured, folder)
    own = sources.explanation or (explain(plan, measured) if explanation is True else None)
    return HtmlReport(
        render_page(
            page_content(
                PageSources(document, name, measured, machine, profiles, own, sources.frontier, sources.check)
            )
        )
    )


@dataclass(frozen=True)
class FilesBeside:
    """What lies beside a plan's file and belongs to it."""

    profile: Path | None
    frontier: Path | None
    check: Path | None


def find_beside(path: Path) -> FilesBeside:
    """The profile, the newest frontier and the newest check beside a plan's file that were made of the same.
    Raises FileError where the plan cannot be read."""
    text = read_text(path, "plan")
    plan = Plan.parse(text, str(path))
    profile = path.parent / Path(plan.profile.file).name
    return FilesBeside(
        profile if plan.profile.file and profile.is_file() else None,
        _newest(path.parent, "frontier", lambda file: _same_frontier(file, plan)),
        _newest(path.parent, "check", lambda file: Check.load(file).plan_sha256 == sha256(text)),
    )


def _newest(folder: Path, kind: str, suits: object) -> Path | None:
    assert callable(suits)
    files = sorted(folder.glob(f"*.{kind}.json"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
    for file in files:
        try:
            if suits(file):
                return file
        except FileError:
            continue  # a file of another kind, or a broken one, which nobody named
    return None


def _same_frontier(file: Path, plan: Plan) -> bool:
    """Whether it is of the plan's profile and global batch."""
    first = Frontier.load(file).points[0].plan
    return first.profile.sha256 == plan.profile.sha256 and first.mini_batch == plan.mini_batch
