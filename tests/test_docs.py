"""What the README and the pages of docs/ show is what there is."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import suppress
from itertools import pairwise, takewhile
from pathlib import Path

import pytest

import pplan
from pplan.cli.app import main
from pplan.cost_models.runtime import RUNTIMES, list_runtimes
from pplan.cost_models.schedules import SCHEDULES
from pplan.planner.plan_file import Plan
from pplan.planner.planners import PLANNERS
from pplan.profiler.profile_file import Profile

ROOT = Path(__file__).resolve().parent.parent
LISTED = subprocess.run(
    ["git", "ls-files", "README.md", ":(glob)docs/**/*.md"],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=True,
)
PAGES = {
    name.removeprefix("docs/"): path.read_text()
    for name in LISTED.stdout.split()
    if (path := ROOT / name).is_file()
}
"""Pages that git tracks, those of docs/ by their path in it."""
README = PAGES["README.md"]
EXAMPLE = "getting-started.md"
"""Shows the files that the examples of the others begin with."""
LEFT_OUT = "..."
WIDTH = "100"
"""Columns of the terminal whose output is quoted."""


def blocks(language: str, page: str = "README.md") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGES[page], flags=re.DOTALL)


def names_in_table(page: str, heading: str) -> list[str]:
    """The names in the first column of the first table behind a heading."""
    rows = PAGES[page].split(f"{heading}\n", 1)[1].split("\n| --- ")[1].split("\n\n")[0].splitlines()[1:]
    return [name for row in rows for name in re.findall(r"`(\w[\w-]*)", row.split("|")[1])]


def examples(page: str) -> Iterator[tuple[str, list[list[str]]]]:
    """Every command of the console blocks, in their order, and the runs of lines that it is said to print."""
    for block in blocks("console", page):
        lines = block.splitlines()
        starts = [at for at, line in enumerate(lines) if line.startswith("$ ")]
        for start, end in pairwise([*starts, len(lines)]):
            shown = re.split(
                rf"^{re.escape(LEFT_OUT)}$", "\n".join(lines[start + 1 : end]), flags=re.MULTILINE
            )
            yield lines[start][2:], [part.strip("\n").splitlines() for part in shown if part.strip()]


WITH_EXAMPLES = [page for page in PAGES if blocks("console", page)]


def stands_in(part: list[str], lines: list[str]) -> int | None:
    """Where these lines stand, one after another; None where they do not."""
    starts = range(len(lines) - len(part) + 1)
    return next((at for at in starts if lines[at : at + len(part)] == part), None)


def test_it_starts_with_the_two_commands() -> None:
    assert blocks("sh")[:2] == [
        "pip install -e . && pplan profile vgg19 && pplan solve --gpus 8 && pplan export torchgpipe\n",
        'pip install -e ".[test]" && pytest -n 2 --dist loadfile -m "not slow"\n',
    ]


@pytest.mark.slow
def test_drawings_are_those_of_the_code() -> None:
    """Their words, because every version of matplotlib places them a little differently."""
    drawn = runpy.run_path(str(ROOT / "docs/draw_images.py"))["drawings"]()
    assert len(drawn) == 6
    for name, drawing in drawn.items():
        old, new = ((ROOT / "docs/images" / name).read_text(), drawing.to_bytes("svg").decode())
        words = [re.findall(r"<text[^>]*>([^<]*)", svg) for svg in (old, new)]
        assert len(words[0]) > 3
        assert words[0] == words[1], f"{name}: run python docs/draw_images.py"


def test_every_image_is_shown() -> None:
    shown = {name for page in PAGES.values() for name in re.findall(r"images/([\w-]+\.svg)", page)}
    assert shown == {path.name for path in (ROOT / "docs/images").iterdir()}


def test_the_readme_is_short() -> None:
    assert len(README.splitlines()) <= 100


@pytest.mark.parametrize("home", [None, "https://example.org/pplan"])
def test_it_reads_on_the_package_index(home: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No image and no link leads to a file that the index does not have."""
    project = {"urls": {"Repository": home}} if home else {}
    monkeypatch.setattr(tomllib, "loads", lambda text: {"project": project})  # noqa: ARG005
    text = runpy.run_path(str(ROOT / "setup.py"))["description"]()
    links = re.findall(r"\]\(([^)\s]+)\)", text)
    assert all(link.startswith("https://") for link in links)
    assert len(links) > 40 if home else not links
    assert text.count("![") == (2 if home else 0)
    assert blocks("sh")[0] in text


def test_continuous_integration_runs_its_test_command() -> None:
    assert blocks("sh")[1] in (ROOT / ".ci/run").read_text()


def headings(text: str) -> list[str]:
    """As links name them."""
    return [
        re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)", text, flags=re.MULTILINE)
    ]


@pytest.mark.parametrize("page", PAGES)
def test_its_links_lead_somewhere(page: str) -> None:
    own = ROOT / "README.md" if page == "README.md" else ROOT / "docs" / page
    for link in re.findall(r"\]\(([^)\s]+)\)", PAGES[page]):
        file, _, heading = link.partition("#")
        if not link.startswith("https://"):
            target = (own.parent / file).resolve() if file else own
            assert target.is_file(), link
            assert not heading or heading in headings(target.read_text()), link


def test_every_page_is_listed() -> None:
    listed = set(re.findall(r"\(((?:lab/)?[\w-]+\.md)\)", PAGES["index.md"]))
    assert listed == set(PAGES) - {"README.md", "index.md"}
    assert set(re.findall(r"\(docs/((?:lab/)?[\w-]+\.md)\)", README)) == listed | {"index.md"}
    nav = re.findall(r'"((?:lab/)?[\w-]+\.md)"', (ROOT / "zensical.toml").read_text())
    assert len(nav) == len(set(nav))
    made_by_the_site = {"commands.md", "functions.md", "fields.md", "contributing.md", "changelog.md"}
    assert set(nav) == listed | {"index.md"} | made_by_the_site


def test_the_documentation_is_short() -> None:
    """Without lab notes: what people read to get work done."""
    pages = [page for page in PAGES if page != "README.md" and not page.startswith("lab/")]
    assert sum(len(PAGES[page].splitlines()) for page in pages) <= 2500
    for page in pages:
        text = re.sub(r"```.*?```", "", PAGES[page], flags=re.DOTALL)
        for paragraph in text.split("\n\n"):
            lines = paragraph.strip().splitlines()
            is_prose = lines and not lines[0].startswith(("|", "- ", "#", "1.", "    ", "["))
            assert not is_prose or len(lines) <= 5, f"{page}: {lines[0]}"


def test_all_say_the_same_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"\n## [{version}] - 20" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.parametrize("runtime", ["torchgpipe", "fairscale", "deepspeed"])
def test_its_scripts_are_the_examples(runtime: str) -> None:
    script = (ROOT / f"examples/train_{runtime}.py").read_text()
    assert script in blocks("python", "exporting.md")
    assert len(script.splitlines()) < 30


def test_the_training_script_is_the_example() -> None:
    assert (ROOT / "examples/train_with_a_plan.py").read_text() in blocks("python", "training.md")


@pytest.fixture(scope="module")
def example(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the example shows, and those that its commands make."""
    folder = tmp_path_factory.mktemp("example")
    (folder / "gpt.csv").write_text(blocks("csv", EXAMPLE)[0])
    (folder / "machine.toml").write_text(blocks("toml", EXAMPLE)[0])
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for command, _ in examples(EXAMPLE):
            patch.setattr(sys, "argv", shlex.split(command))
            main()
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_EXAMPLES)
def test_its_commands_print_what_it_says(
    page: str,
    example: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One after another in a folder with the files of the example."""
    names = ("gpt.csv", "machine.toml") if page == EXAMPLE else [path.name for path in example.iterdir()]
    for name in names:
        shutil.copy(example / name, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", WIDTH)
    capsys.readouterr()
    for command, parts in examples(page):
        monkeypatch.setattr(sys, "argv", shlex.split(command))
        main()
        captured = capsys.readouterr()
        printed = [line.rstrip() for line in (captured.out + captured.err).splitlines()]
        assert parts, command
        for part in parts:
            at = stands_in(part, printed)
            assert at is not None, "\n".join([command, "does not print", *part, "but", *printed])
            printed = printed[at + len(part) :]


def test_examples_are_there() -> None:
    assert {EXAMPLE, "solving.md", "explaining.md", "exporting.md"} <= set(WITH_EXAMPLES)
    assert sum(len(list(examples(page))) for page in WITH_EXAMPLES) > 15


def test_the_options_that_they_name_exist(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    named = dict[tuple[str, ...], set[str]]()
    shown = "".join(block for page in PAGES for block in blocks("sh", page))
    for line in shown.replace("\\\n", "").splitlines():
        for command in re.findall(r"\bpplan [^#&]+", line):
            _, verb, *words = shlex.split(command)
            parts = takewhile(re.compile("[a-z]+").fullmatch, words) if verb == "machine" else ()
            options = (word for word in words if word.startswith("--"))
            named.setdefault((verb, *parts), set()).update(options)
    assert len(named) > 8
    for names, needed in named.items():
        known = set[str]()
        for option in ("--help", "--help-all"):  # the second one where there are rare options
            monkeypatch.setattr(sys, "argv", ["pplan", *names, option])
            with suppress(SystemExit):
                main()
            known |= set(re.findall(r"--[\w-]+", capsys.readouterr().out))
        assert needed <= known, names


def test_its_machine_of_two_kinds_is_read(tmp_path: Path) -> None:
    path = tmp_path / "two.toml"
    path.write_text(blocks("toml", "machines.md")[0])
    machine = pplan.topology(path)
    assert [machine.device(rank).speed for rank in (0, 3, 4, 7)] == [1.0, 1.0, 0.2, 0.2]


def test_they_name_every_planner() -> None:
    assert names_in_table("planners.md", "\n## Named planners") == list(PLANNERS)
    assert not [name for name in PLANNERS if f"`{name}" not in PAGES["lab/planners.md"]]


def test_they_name_every_runtime() -> None:
    assert sorted(names_in_table("exporting.md", "# Exporting")) == sorted(RUNTIMES)


def test_they_name_every_schedule() -> None:
    assert names_in_table("schedules.md", "# Schedules") == list(SCHEDULES)
    rows = PAGES["schedules.md"].split("| name | runs in |")[1].split("\n\n")[0].splitlines()[2:]
    for row in rows:
        name, runtimes = (re.findall("`([^`]+)`", cell) for cell in row.split("|")[1:3])
        assert runtimes == list_runtimes(name[0])


def test_they_name_every_function() -> None:
    named = {name for name in re.findall(r"`(\w+)\b", PAGES["python-api.md"]) if name in pplan.__all__}
    assert named == {name for name in pplan.__all__ if not name.startswith("__")}


@pytest.mark.parametrize(("heading", "model"), [("## Profile", Profile), ("## Plan", Plan)])
def test_the_keys_of_the_files_are_those(heading: str, model: type[Profile] | type[Plan]) -> None:
    table = PAGES["file-formats.md"].split(f"\n{heading}:")[1].split("\n| --- ")[1].split("\n\n")[0]
    named = {name for row in table.splitlines()[1:] for name in re.findall(r"`(\w+)`", row.split("|")[1])}
    known = {field.alias or name for name, field in model.model_fields.items()}
    assert named <= known
    assert {name for name, field in model.model_fields.items() if field.is_required()} <= named


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_the_files_that_are_named_exist(page: str) -> None:
    named = re.findall(r"`([\w./]+(?:\.py|/))`", (ROOT / page).read_text())
    assert len(named) > 20
    named = [name for name in named if "NAME" not in name and "/" in name.rstrip("/")]
    assert not [name for name in named if not (ROOT / name).exists()]


def test_each_benchmark_is_named_by_a_page() -> None:
    """Or a script that is imports it. A script that no page names measures nothing that a user reads."""
    texts = {path.name: path.read_text() for path in (ROOT / "benchmarks").glob("*.py")}
    named = {name for page in PAGES.values() for name in re.findall(r"benchmarks/(\w+\.py)", page)}
    imported = {
        f"{name}.py" for text in texts.values() for name in re.findall(r"^(?:from|import) (\w+)", text, re.M)
    }
    assert named <= set(texts)
    assert set(texts) <= named | imported
