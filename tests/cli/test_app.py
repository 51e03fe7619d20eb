"""The outer shell: help, version, and how each kind of error leaves it."""

from __future__ import annotations

import errno
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pplan.cli.usage import list_verbs
from pplan.cli.verb_table import VERBS
from pplan.cli.verbs import root
from pplan.cost_models.errors import FileError, InfeasibleError, ModelError
from pplan.cost_models.machines import PRESETS
from pplan.planner.plan_file import Plan
from pplan.profiler.profile_file import Profile

Run = Callable[..., Any]


def _python(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def _raising(error: BaseException) -> Callable[..., None]:
    def raise_it(*_: object, **__: object) -> None:
        raise error

    return raise_it


@pytest.fixture
def solve_raises(
    here: Path, profile: Profile, monkeypatch: pytest.MonkeyPatch
) -> Callable[[BaseException], None]:
    """Makes `pplan solve` meet an error in its middle."""
    profile.save(here / "toy.profile.json", force=False)
    return lambda error: monkeypatch.setattr("pplan.api.solve.solve", _raising(error))


@pytest.mark.parametrize("arguments", [(), ("--help",), ("-h",)])
def test_help_names_every_verb(run: Run, arguments: tuple[str, ...]) -> None:
    ran = run(*arguments)
    assert ran.status == 0
    assert ran.err == ""
    verbs = "profile import solve export show simulate machine"
    for verb in verbs.split():
        assert verb in ran.out


@pytest.mark.parametrize(
    ("verb", "options"),
    [
        (
            "profile",
            "--input --classes --micro-batch-sizes --dtype --device --budget --seed --output --force --json",
        ),
        (
            "solve",
            "--gpus --gpus-per-node --gpu --memory --bandwidth --latency --topology --runtime --mini-batch "
            "--micro-batches --schedule --recompute --optimizer --output --force --json",
        ),
        ("machine measure kernels", "--device --dtype --sequence --tp --ep --cp --repeats --output --force"),
        ("machine measure links", "--sizes --repeats --timeout --output --force --json"),
        (
            "import",
            "--format --model --micro-batch-size --granularity --dtype --tp --output --force --json "
            "--profile --gpus --gpus-per-node --gpu --memory --bandwidth --latency --topology --runtime "
            "--mini-batch --micro-batches --schedule --virtual-stages --replicas --recompute --optimizer",
        ),
        ("export", "--device --output --force --json"),
        ("show", "--json"),
        (
            "simulate",
            "--schedule --stages --micro-batches --virtual-stages --forward-ms --backward-ms --weight-ms "
            "--transfer-ms --profile --gpus-per-node --gpu --memory --bandwidth --latency --topology --trace "
            "--plot --plot-schedules --force --json --actions --list --text",
        ),
        ("machine show", "--gpus --toml --json"),
    ],
)
def test_help_of_a_verb_names_every_option(run: Run, verb: str, options: str) -> None:
    ran = run(*verb.split(), "--help-all" if VERBS[verb].common_options else "--help")
    assert ran.status == 0
    for option in options.split():
        assert re.search(rf"^  (-\w, )?{option}\b", ran.out, re.MULTILINE), option


def test_a_verb_shows_few_options_and_all_on_request(run: Run) -> None:
    for verb, command in list_verbs(root):
        names = {name for parameter in command.params for name in parameter.opts if not is_alias(parameter)}
        few = run(*verb.split(), "--help").out
        shown = set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", few, re.MULTILINE))
        assert len(shown) <= 25, verb
        assert shown >= set(VERBS[verb].common_options.split()), verb
        assert "<bool>" not in few
        assert "BOOLEAN" not in few
        options = {name for name in names if name.startswith("--")}
        if VERBS[verb].common_options:
            everything = run(*verb.split(), "--help-all").out
            assert options == set(re.findall(r"^  (?:-\w, )?(--[\w-]+)", everything, re.MULTILINE)) - {
                "--help"
            }
            assert f"{len(options - shown)} more options: pplan {verb} --help-all" in few
        else:
            assert options == shown - {"--help"}, verb


def is_alias(parameter: Any) -> bool:
    """Whether a parameter is another name of an option, which no help shows."""
    return bool(parameter.param_type_name == "option" and parameter.hidden)


def test_version(run: Run) -> None:
    from importlib.metadata import version

    ran = run("--version")
    assert (ran.status, ran.out, ran.err) == (0, f"pplan {version('pplan')}\n", "")


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_load_nothing_heavy(here: Path, option: str) -> None:
    code = (
        f"import sys; from pplan.cli.app import main; status = main([{option!r}])\n"
        "heavy = {'torch', 'torchvision', 'numpy', 'pydantic', 'networkx'} & set(sys.modules)\n"
        "heavy |= {'pplan.cli.solve_command', 'pplan.planner.plan_options'} & set(sys.modules)\n"
        "sys.exit(f'loaded {heavy}' if heavy else status)"
    )
    ran = _python(code, here)
    assert (ran.returncode, ran.stderr) == (0, "")
    assert ran.stdout


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (
            ["solve", "--help"],
            {"solve_options", "degree_options", "objective", "plan_options", "replan_options"},
        ),
        (["check", "--help"], {"check_options"}),
        (["explain", "--curent", "3,4"], {"explain_options"}),
        (
            ["solve", "none.profile.json"],
            {"solve_options", "degree_options", "objective", "plan_options", "replan_options"},
        ),
        (["profile", "vgg91"], {"profile_options"}),
    ],
)
def test_a_verb_loads_its_own_options_alone(here: Path, words: list[str], options: set[str]) -> None:
    """Its help does, and what is refused before anything is read."""
    code = (
        "import sys; from pplan.cli.app import main\n"
        f"try: main({words!r})\n"
        "except SystemExit: pass\n"
        "names = [name for name in sys.modules if not name.startswith('pplan.cli')]\n"
        "heavy = {'torch', 'torchvision', 'numpy', 'pydantic', 'networkx'} & {*names}\n"
        "own = {name.rpartition('.')[2] for name in names if name.startswith('pplan.')}\n"
        "print(sorted(heavy | {name for name in own if name.endswith('options') or name == 'objective'}),"
        " file=sys.stderr)"
    )
    assert _python(code, here).stderr.splitlines()[-1] == str(sorted(options))


@pytest.mark.parametrize(
    ("arguments", "what", "hint"),
    [
        (["solv"], "no such verb: solv", "Did you mean pplan solve or pplan show?"),
        (
            ["xyz"],
            "no such verb: xyz",
            "The verbs are: demo, profile, import, solve, export, show, explain, "
            "compare, report, simulate, check, lint, machine.",
        ),
        (
            ["topology", "show", "x.toml"],
            "topology is another command now",
            "Use: pplan machine list, or pplan machine show NAME",
        ),
        (["--verson"], "no such option: --verson", "Did you mean --version? See pplan --help"),
        (["solve", "--gpu-s", "2"], "solve: no such option: --gpu-s", "Did you mean --gpus or --gpu?"),
        (["solve", "--debug"], "solve: no such option: --debug", "pplan --debug solve ..."),
        (
            ["show", "--gpus", "2"],
            "show: no such option: --gpus",
            "It is an option of: pplan import, pplan solve, pplan lint, pplan machine show.",
        ),
        (
            ["solve", "missing.json"],
            "missing.json: no such profile file",
            "Name an existing profile file.",
        ),
        (
            ["solve", "--lost", "1", "missing.json"],
            "missing.json: no such plan file",
            "Name an existing plan file.",
        ),
        (["profile"], "profile: missing argument 'MODEL'", "Give it: pplan profile MODEL."),
        (["solve", "--gpus"], "solve: option '--gpus' requires an argument", "See pplan solve --help"),
        (["show", "a", "b"], "show: got unexpected extra argument", "See pplan show --help"),
    ],
)
def test_wrong_usage(run: Run, arguments: list[str], what: str, hint: str) -> None:
    ran = run(*arguments)
    assert ran.status == 2
    assert ran.out == ""
    first, second = ran.lines
    assert first.startswith(f"pplan: {what}")
    assert second.startswith("  ")
    assert hint in second


def test_our_errors_are_two_lines_and_their_status(run: Run, solve_raises: Callable[..., None]) -> None:
    for error, status in (
        (InfeasibleError("no plan\nfits", "More memory."), 3),
        (ModelError("bad", "Mend."), 2),
    ):
        solve_raises(error)
        ran = run("solve", "--gpus", "2")
        assert ran.status == status
        assert ran.lines[1:] == [f"pplan: {' '.join(error.what.split())}", f"  {error.hint}"]


def test_a_defect_asks_for_a_report(run: Run, solve_raises: Callable[..., None]) -> None:
    solve_raises(ZeroDivisionError("by zero\nsecond line"))
    ran = run("solve", "--gpus", "2")
    assert ran.status == 1
    assert ran.out == ""
    assert ran.lines[1] == "pplan: internal error: ZeroDivisionError: by zero"
    assert "report" in ran.lines[2]
    assert "--debug" in ran.lines[2]
    assert len(ran.lines) == 3


@pytest.mark.parametrize("how", ["option", "environment"])
def test_debug_shows_the_traceback(
    run: Run, solve_raises: Callable[..., None], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    solve_raises(FileError("it broke", "Mend it."))
    if how == "environment":
        monkeypatch.setenv("PPLAN_DEBUG", "1")
    ran = run(*(["--debug"] if how == "option" else []), "solve", "--gpus", "2")
    assert ran.status == 2
    assert "Traceback (most recent call last):" in ran.err
    assert ran.lines[-2:] == ["pplan: it broke", "  Mend it."]


def test_interruption(run: Run, solve_raises: Callable[..., None]) -> None:
    solve_raises(KeyboardInterrupt())
    ran = run("solve", "--gpus", "2")
    assert ran.status == 130
    assert ran.lines[1:] == ["pplan: interrupted"]


@pytest.mark.parametrize(
    ("error", "what"),
    [
        (
            ModuleNotFoundError("No module named 'foo'", name="foo"),
            "the Python package 'foo' is not installed",
        ),
        (MemoryError(), "this machine's memory is full"),
        (OSError(errno.ENOSPC, "No space left on device"), "cannot write: No space left on device"),
    ],
)
def test_what_the_machine_lacks(
    run: Run, solve_raises: Callable[..., None], error: Exception, what: str
) -> None:
    solve_raises(error)
    ran = run("solve", "--gpus", "2")
    assert ran.status == 2
    assert ran.lines[1] == f"pplan: {what}"
    assert len(ran.lines) == 3


def test_a_missing_module_of_ours_is_a_defect(run: Run, solve_raises: Callable[..., None]) -> None:
    solve_raises(ModuleNotFoundError("No module named 'pplan.gone'", name="pplan.gone"))
    assert run("solve", "--gpus", "2").status == 1


@pytest.mark.slow
def test_a_reader_that_has_gone_is_no_error(here: Path, plan: Plan) -> None:
    layers = [f"layer{index:05}" for index in range(30_000)]
    stage = plan.stages[0].model_copy(update={"first_layer": 0, "last_layer": 29_999})
    fields = {"layer_names": layers, "balance": [30_000], "stages": [stage], "alternatives": []}
    plan.model_copy(update=fields).save(here / "toy.plan.json", force=False)
    shown = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import sys; from pplan.cli.app import main; sys.exit(main())",
            "show",
            "--json",
        ],
        cwd=here,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert shown.stdout is not None
    assert shown.stderr is not None
    assert shown.stdout.read(1) == b"{"
    shown.stdout.close()
    err = shown.stderr.read().decode()
    shown.stderr.close()
    assert shown.wait(timeout=60) == 0
    assert err == "Using toy.plan.json (newest profile or plan in this directory)\n"


@pytest.mark.slow
def test_a_full_standard_output(here: Path, plan: Plan) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("this system has no /dev/full")
    plan.save(here / "toy.plan.json", force=False)
    with full.open("w") as out:
        ran = subprocess.run(
            [sys.executable, "-c", "import sys; from pplan.cli.app import main; sys.exit(main())", "show"],
            cwd=here,
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    assert ran.returncode == 2
    assert ran.stderr.splitlines()[1].startswith("pplan: cannot write: ")


WITHOUT_TORCH = "raise ImportError('torch is made unimportable')\n"


COSTS = "--schedule zb-v --stages 2 --micro-batches 4 --forward-ms 1 --backward-ms 1 --weight-ms 1"


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["show"],
        ["show", "--json"],
        ["export", "torchgpipe"],
        ["simulate", "--list"],
        ["simulate", *COSTS.split()],
    ],
)
def test_works_without_torch(
    here: Path, plan: Plan, tmp_path_factory: pytest.TempPathFactory, arguments: list[str]
) -> None:
    blocked = tmp_path_factory.mktemp("blocked")
    for package in ("torch", "torchvision"):
        (blocked / f"{package}.py").write_text(WITHOUT_TORCH)
    plan.save(here / "toy.plan.json", force=False)
    code = f"import sys; sys.argv[1:] = {arguments!r}; from pplan.cli.app import main; sys.exit(main())"
    ran = _python(code, here, PYTHONPATH=str(blocked))
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout != ""


@pytest.mark.slow
def test_profile_without_torch_says_so(here: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    blocked = tmp_path_factory.mktemp("blocked")
    (blocked / "torch.py").write_text(WITHOUT_TORCH)
    code = "import sys; from pplan.cli.app import main; sys.exit(main(['profile', 'vgg19']))"
    ran = _python(code, here, PYTHONPATH=str(blocked))
    assert ran.returncode == 2
    assert ran.stderr.splitlines() == [
        "pplan: torch cannot be imported: torch is made unimportable",
        "  Install it: pip install torch",
    ]
    assert not list(here.iterdir())


@pytest.mark.parametrize(
    ("raised", "status", "first"),
    [
        ("KeyboardInterrupt", 130, "pplan: interrupted"),
        (
            "ModuleNotFoundError('gone', name='typer')",
            2,
            "pplan: the Python package 'typer' is not installed",
        ),
    ],
)
def test_what_happens_while_the_verbs_are_imported(
    here: Path, tmp_path_factory: pytest.TempPathFactory, raised: str, status: int, first: str
) -> None:
    blocked = tmp_path_factory.mktemp("blocked")
    (blocked / "typer.py").write_text(f"raise {raised}\n")
    code = "import sys; from pplan.cli.app import main; sys.exit(main(['show']))"
    ran = _python(code, here, PYTHONPATH=str(blocked))
    assert ran.returncode == status
    assert ran.stderr.splitlines()[0] == first
    assert "Traceback" not in ran.stderr


def test_little_is_imported_before_an_interruption_is_caught(here: Path) -> None:
    code = (
        "import sys, pplan.cli.app\n"
        "print(sorted({'typer', 'rich', 'click', 'numpy', 'pydantic', 'json'} & set(sys.modules)))"
    )
    assert _python(code, here).stdout == "[]\n"


def test_help_of_solve_names_every_gpu(run: Run) -> None:
    printed = run("solve", "--help").out.replace(",", " ").split()
    assert PRESETS
    for name in PRESETS:
        assert name in [word.rstrip(".") for word in printed]


def test_an_error_does_not_steer_the_terminal(run: Run, solve_raises: Callable[..., None]) -> None:
    for error in (ModelError("layer a\x1b[31m", "Mend\x07 it."), ZeroDivisionError("a\x1b[31m")):
        solve_raises(error)
        ran = run("solve", "--gpus", "2")
        assert r"a\x1b[31m" in ran.err
        assert not {"\x1b", "\x07"} & set(ran.err)
