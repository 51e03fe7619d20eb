"""A plan as one HTML page, to be looked at and sent on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from ..cost_models import arguments
from ..cost_models.document import Document
from ..cost_models.errors import FileError, UsageError
from ..cost_models.quantities import format_bytes
from ..cost_models.text_files import read_text, sha256, write_whole
from ..planner.plan_file import MOST_DRAWN_LAYERS, Plan
from ..profiler.profile_file import Profile
from ..runtimes.checking.records import Check
from .load import as_plan, check_layers, profile_and_reference, profile_next_to
from .machine import planned_machine
from .page.page_content import PageSources, page_content
from .page.render import render_page

if TYPE_CHECKING:
    from ..planner.explanation.explanation import Explanation
    from ..planner.objectives.frontier import Frontier


@dataclass(frozen=True, repr=False)
class HtmlReport:
    """The text of the page."""

    html: str

    def __repr__(self) -> str:
        return f"<HtmlReport: {format_bytes(len(self.html.encode()))}>"

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
    others: Sequence[Plan | str | Path] = (),
    explanation: Explanation | None = None,
    frontier: Frontier | str | Path | None = None,
    check: Check | str | Path | None = None,
) -> HtmlReport:
    """`plan` as one HTML page that needs no network: the answer, the cuts (which can be moved), the timeline,
    memory, comparisons, layers, and how the numbers were made.

    `others`: plans that stand beside it, with the timelines of all on one axis; the profile of each is read
    where it lies beside the plan's file. `plan`, `profile`, `frontier` and `check` may be the paths of their
    files. Without the profile that the plan was made from the page has no layers and, unless it is of a
    configuration, no timeline, and says so. `explanation`: what `pplan.explain` returns.

    >>> import pplan
    >>> page = pplan.report("gpt.plan.json", "gpt.profile.json")
    >>> "<h1>" in page.html
    True

    Raises UsageError (a profile of other layers; an explanation, a frontier or a check of something else),
    FileError.
    """
    document = as_plan(plan)
    if profile is not None and len(document.layer_names) > MOST_DRAWN_LAYERS:
        raise UsageError(
            f"report: the plan has {len(document.layer_names)} layers, at most {MOST_DRAWN_LAYERS} are drawn",
            "Use pplan explain and pplan show, or profile the model in blocks.",
        )
    sources = PageSources(
        document,
        Path(plan).name if isinstance(plan, str | Path) else "",
        explanation=None if explanation is None else _explanation(explanation),
        frontier=None if frontier is None else _frontier(frontier),
        check=_document("check", check, Check, "pplan.check(plan, profile)"),
    )
    _check_subject(sources, plan)
    if isinstance(others, str) or not isinstance(others, Sequence):
        raise UsageError(
            f"others={others!r}: is no sequence of plans but of type {type(others).__name__}",
            'For example: others=["b.plan.json"].',
        )
    sources = replace(_with_profile(sources, plan, profile), others=[_other_sources(own) for own in others])
    return HtmlReport(render_page(page_content(sources)))


def _with_profile(
    sources: PageSources, plan: Plan | str | Path, profile: Profile | str | Path | None
) -> PageSources:
    """Return the sources with the plan's profile and its machine. Raises UsageError and FileError."""
    if profile is None:
        return sources
    measured, reference = profile_and_reference(profile, "", "", sources.plan)
    check_layers(sources.plan, reference)
    folder = Path(plan).parent if isinstance(plan, str | Path) else Path()
    machine, profiles = planned_machine(sources.plan, measured, folder)
    return replace(sources, profile=measured, machine=machine, profiles=profiles)


def _other_sources(plan: Plan | str | Path) -> PageSources:
    """Return a plan that stands beside the page's own, with the profile beside its file."""
    document = as_plan(plan)
    if not isinstance(plan, str | Path):
        return PageSources(document)
    return _with_profile(PageSources(document, Path(plan).name), plan, _profile_beside(Path(plan), document))


def _check_subject(sources: PageSources, plan: Plan | str | Path) -> None:
    """Raises UsageError where explanation, frontier or check are not of the plan, or of its problem."""
    own = sources.plan
    if sources.frontier is not None:
        first = sources.frontier.points[0].plan
        others = [field for field, value in own.problem.items() if first.problem[field] != value]
        if others:
            raise UsageError(
                f"frontier: it is of another {' and '.join(others)} than the plan",
                "Make it with the options of the plan: pplan solve --frontier",
            )
    if sources.explanation is not None and _is_of_another(sources.explanation, own):
        raise UsageError(
            f"explanation: it is of another plan than this one, of {sources.explanation.model}",
            "Explain this plan: pplan.explain(plan, profile)",
        )
    check = sources.check
    if check is None:
        return
    content = read_text(Path(plan), "plan") if isinstance(plan, str | Path) else None
    other_file = content is not None and check.plan_sha256 not in ("", sha256(content))
    if other_file or check.model != own.model:
        raise UsageError(
            f"check: it is of {check.plan}, a plan of {check.model}, and not of this one",
            "Check this plan: pplan check --save",
        )


def _is_of_another(explanation: Explanation, plan: Plan) -> bool:
    """Whether model, stages, devices, micro-batches or schedule are not those of the plan."""
    own = explanation.plan
    stages = (own.balance, own.devices) == (plan.balance, [stage.devices for stage in plan.stages])
    batches = (own.micro_batches, own.micro_batch_size) == (plan.micro_batches, plan.micro_batch_size)
    return (explanation.model, own.schedule) != (plan.model, plan.schedule) or not (stages and batches)


Kind = TypeVar("Kind", bound=Document)


def _explanation(source: Explanation) -> Explanation:
    # Imported where there is one: the search stands behind it, and behind frontiers.
    from ..planner.explanation.explanation import Explanation

    _check_instance("explanation", source, Explanation, "pplan.explain(plan, profile)")
    return source


def _frontier(source: Frontier | str | Path) -> Frontier | None:
    from ..planner.objectives.frontier import Frontier

    return _document("frontier", source, Frontier, "pplan.frontier(profile, gpus=8)")


def _document(name: str, source: Kind | str | Path | None, kind: type[Kind], maker: str) -> Kind | None:
    """The document, read where it is named by its path. Raises UsageError, FileError."""
    if isinstance(source, str | Path):
        return kind.load(source)
    _check_instance(name, source, kind, maker)
    return source


def _check_instance(name: str, value: object, kind: type[Document], maker: str) -> None:
    if value is not None:
        arguments.instance(name, value, kind, f"Give what {maker} returns.")


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
    return FilesBeside(
        _profile_beside(path, plan),
        _newest(path.parent, "frontier", lambda file: _same_frontier(file, plan)),
        _newest(path.parent, "check", lambda file: Check.load(file).plan_sha256 == sha256(text)),
    )


def _profile_beside(path: Path, plan: Plan) -> Path | None:
    """Return the profile beside a plan's file; None where there is none."""
    profile = profile_next_to(path, plan)
    return profile if plan.training is None and plan.profile.file and profile.is_file() else None


def _newest(folder: Path, kind: str, suits: Callable[[Path], bool]) -> Path | None:
    files = sorted(folder.glob(f"*.{kind}.json"), key=lambda file: file.stat().st_mtime_ns, reverse=True)
    for file in files:
        try:
            if suits(file):
                return file
        except FileError:
            continue  # a file of another kind, or a broken one, which nobody named
    return None


def _same_frontier(file: Path, plan: Plan) -> bool:
    """Whether it is of the plan's problem."""
    from ..planner.objectives.frontier import Frontier

    return Frontier.load(file).points[0].plan.problem == plan.problem
