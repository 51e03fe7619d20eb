"""Every verb with files that want something run: nothing is, and each ends in our own two lines.

The files name code (factories, paths, remote code, losses), carry terminal escapes, quotes, newlines and
look-alikes in every name, numbers and depths that nothing holds, and expressions that match for ever.
"""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import pplan
from pplan.cli.usage import list_verbs
from pplan.cli.verbs import root
from pplan.cost_models.errors import ModelError
from pplan.cost_models.text_files import sha256
from pplan.planner.plan_file import Plan
from pplan.profiler.models import load_model
from pplan.profiler.profile_file import Profile
from pplan.runtimes.checking.processes.trained_model import _load_model
from pplan.runtimes.checking.records import Job, ModelSpec

DRIVER = Path(__file__).with_name("hostile_driver.py")
ESCAPES = "\x1b]0;owned\x07\x1b[31m\x9b2J\x7f\u202egnp.\u2028'\"\n$(touch owned)`touch owned`{}{0}%s;\\"
LOOK_ALIKE = "\u043es:system"
PATHS = {"../evil", "/dev/zero", "evil.profile.json"}
FOREVER = "(a+)+$"
LONG = "a" * 60 + "!"

Content = dict[str, Any]
Change = Callable[[Content, Content], None]
"""Of a profile and of the plan made from it."""


def model(name: str, **settings: Any) -> Change:
    def change(profile: Content, plan: Content) -> None:
        profile |= {"model": name, "settings": settings}
        plan["model"] = name

    return change


def keys(**own: Any) -> Change:
    """Of the profile."""

    def change(profile: Content, plan: Content) -> None:
        del plan
        profile |= own

    return change


def of_plan(**own: Any) -> Change:
    def change(profile: Content, plan: Content) -> None:
        del profile
        plan |= own

    return change


def renamed(profile: Content, plan: Content) -> None:
    """Every text of both files."""
    profile |= {"model": ESCAPES, "device_name": ESCAPES, "notes": [ESCAPES], "dtype": ESCAPES}
    profile |= {"granularity": f"module:{ESCAPES}", "unknown": ESCAPES}
    for index, layer in enumerate(profile["layers"]):
        layer |= {"name": f"{ESCAPES}{index}", "kind": ESCAPES, "cut_reason": ESCAPES}
    plan |= {"model": ESCAPES, "topology": ESCAPES, "searched": ESCAPES, "notes": [ESCAPES]}
    plan["layer_names"] = [layer["name"] for layer in profile["layers"]]
    plan["made_by"] = {"command": ESCAPES, "time": ESCAPES}
    plan["baselines"] = [{"name": ESCAPES, "step_seconds": None, "reason": ESCAPES, "detail": ESCAPES}]
    plan["stages"][0]["memory"] = {ESCAPES: 1}


def slow_names(profile: Content, plan: Content) -> None:
    """With a planner of the plan's that searches them."""
    for index, layer in enumerate(profile["layers"]):
        layer["name"] = f"{LONG}{index}"
    plan["layer_names"] = [layer["name"] for layer in profile["layers"]]
    plan["options"] = plan["options"] | {"planner": f"deepspeed-type:{FOREVER}", "keep_together": ["a*" * 40]}


def machine(text: str) -> Change:
    return of_plan(machine=text)


CODE: dict[str, Change] = {
    "a command": model("os:system", command="touch owned"),
    "a factory": model("evil:make"),
    "a factory in a package": model("evil.zoo:make.inner", depth=3),
    "an import": model("__import__('evil')"),
    "a module": model("evil"),
    "a path": model("hf:../../evil/config.json"),
    "a configuration here": model("evil_model/config.json"),
    "a folder here": model("hf:evil_model"),
    "remote code": model("hf:gpt2", trust_remote_code=True, auto_map={"AutoModel": "evil--evil.Model"}),
    "another class": model("hf:gpt2", architectures=["EvilModel"]),
    "a kernel": model("hf:gpt2", attn_implementation="evil/kernel"),
    "settings of torchvision's": model("vgg19", weights="evil"),
    "a look-alike": model(LOOK_ALIKE, command="touch owned"),
    "a loss": keys(loss={"name": "evil:loss", "costs": []}),
    "a loss of quotes": keys(loss={"name": 'evil")\nimport evil\n("', "costs": []}),
}
"""What a file may not have built: verbs that build refuse each."""
ODD: dict[str, Change] = {
    "every text": renamed,
    "an expression without end": slow_names,
    "patterns without end": keys(granularity="module:" + ",".join(["*a" * 50] * 20)),
    "a dtype of lines": keys(dtype="float32\nimport evil\n#"),
    "shapes": keys(inputs=[{"shape": [10**9, 10**9], "dtype": "float32)\nimport evil"}], seed=-(2**70)),
    "an optimizer": of_plan(optimizer='evil"); import evil'),
    "a machine": machine('[[device]]\nname = "\\u001b[31m"\nmemory = "1GiB"\nprofile = "../evil"\n'),
    "a device": machine('[[device]]\nname = "a"\nmemory = "1GiB"\nprofile = "/dev/zero"\n'),
    "a machine of escapes": machine(ESCAPES),
    "the profile's name": of_plan(profile={"file": "../../evil.profile.json", "sha256": "0" * 64}),
    "huge numbers": of_plan(mini_batch=10**400, micro_batches=10**400, micro_batch_size=1),
    "large numbers": of_plan(mini_batch=2**61, micro_batches=2**60, micro_batch_size=2),
    "a bubble": of_plan(gpus=10**30, gpus_per_node=10**30),
}
"""What is read, or refused."""
BROKEN = {
    "deep": "[" * 100_000,
    "deep objects": '{"schema": 1, "layers": ' + '{"a":' * 500 + "1" + "}" * 501,
    "not a number": '{"schema": 1, "model": "m", "layers": NaN, "prediction": Infinity}',
    "a long number": '{"schema": ' + "9" * 5000 + ', "layers": [], "prediction": 1}',
    "digits": "1" * 60 + "x",
    "nothing": "",
    "bytes": "\x00\x01" * 100,
    "halves": '{"schema": 1, "model": "\\ud800", "layers": [], "points": [], "prediction": 1}',
}
"""Files that are nothing, whatever a verb takes."""

COULD_BE_KNOWN = ("a module", "a folder here")
"""Names as torchvision's and transformers' are: whether they are, is seen where torch is imported."""
BUILDS = [
    ["check", "hostile.plan.json", "--device", "cpu"],
    ["check", "hostile.plan.json", "--device", "cpu", "--set", "depth=3"],
    ["export", "torch", "hostile.plan.json", "--script", "train.py", "--force"],
    ["export", "torchgpipe", "hostile.plan.json", "--script", "train.py", "--force"],
]
"""What builds the model, or writes what does."""
PLAN, PROFILE = "hostile.plan.json", "hostile.profile.json"
COMMANDS: dict[str, list[list[str]]] = {
    "profile": [
        ["profile", "vgg11", "--device", "analytic:a100-40gb", "--calibrate", PROFILE, "-o", "made.json"],
        ["profile", "vgg11", "--device", "analytic:hostile.toml", "-o", "made.json"],
    ],
    "solve": [
        ["solve", PROFILE, "--gpus", "2", "--time-limit", "2s", "--force"],
        ["solve", PROFILE, "--gpus", "2", "--topology", "hostile.toml", "--json"],
        ["solve", PLAN, "--lost", "1", "--force"],
        ["solve", PLAN, "--lost", "0", "--json"],
    ],
    "export": [
        *BUILDS[2:],
        ["export", "torch", PLAN, "--force"],
        ["export", "fairscale", PLAN, "--json"],
        ["export", "megatron", PLAN, "--script", "train.sh", "--force"],
        ["export", "torchtitan", PLAN, "--script", "train.sh", "--force"],
        ["export", "nemo-automodel", PLAN],
        ["export", "huggingface", PLAN],
    ],
    "import": [
        ["import", PROFILE],
        ["import", "hostile.txt"],
        ["import", PLAN, "--format", "json"],
        ["import", "hostile.txt", "--profile", PROFILE],
        ["import", PLAN, "--profile", PROFILE],
        ["import", "2,2", "--profile", PROFILE, "--json"],
    ],
    "show": [["show", PROFILE], ["show", PLAN], ["show", PLAN, "--json"], ["show", "hostile.txt"]],
    "explain": [["explain", PLAN], ["explain", PLAN, "--json"]],
    "check": [*BUILDS[:2], ["check", PLAN, "--calibration", PROFILE]],
    "compare": [["compare", PLAN], ["compare", PLAN, PLAN, "--json"]],
    "simulate": [
        ["simulate", PLAN],
        ["simulate", PLAN, "--schedule", "gpipe", "--json"],
        ["simulate", "--list", "--schedule", "hostile.schedule"],
        ["simulate", PLAN, "--schedule", "hostile.schedule"],
        ["solve", PROFILE, "--gpus", "2", "--schedule", "hostile.schedule", "--json"],
    ],
    "lint": [
        ["lint", PLAN],
        ["lint", PLAN, "--profile", PROFILE, "--json"],
        ["lint", PROFILE, "--profile", PLAN],
        ["lint", "EtL", "--model", PLAN],
        ["lint", "EtL", "--model", PROFILE, "--json"],
    ],
    "machine": [],
    "machine list": [],
    "machine show": [["machine", "show", "hostile.toml"], ["machine", "show", "hostile.toml", "--toml"]],
    "machine doctor": [],
    "machine measure": [["machine", "measure", "--for", each, "--device", "cpu"] for each in (PLAN, PROFILE)],
    "machine measure links": [],
    "machine measure kernels": [
        ["machine", "measure", "kernels", PLAN, "--device", "cpu"],
        ["machine", "measure", "kernels", PROFILE],
    ],
    "report": [["report", PLAN, "-o", "made.html", "--force"]],
    "config": [],
    "demo": [],
    "schema": [],
}
"""By verb, all that reads a file; none where it takes none."""
READS_NOTHING = {
    *("demo", "config", "schema", "machine", "machine list", "machine doctor"),
    "machine measure links",
}
"""None that is named; all verbs read the defaults of pplan.toml: tests/cli/test_config_command.py."""


@dataclass(frozen=True)
class Ran:
    """A command line on the files of a kind, and what it did."""

    about: str
    arguments: list[str]
    folder: Path
    status: int | None
    out: str
    err: str
    seen: list[str]
    seconds: float

    def __str__(self) -> str:
        return (
            f"{self.about}: {' '.join(self.arguments)}: {self.status}\n{self.out[-500:]}\n{self.err[-1500:]}"
        )


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> tuple[Content, Content]:
    """A profile of a model of torchvision, and a plan of it."""
    cost = {"micro_batch_size": 2, "forward_seconds": 0.01, "backward_seconds": 0.02}
    cost |= {"output_bytes": 80, "saved_bytes": 80}
    layers = [{"name": f"features.{i}", "parameter_bytes": 400, "costs": [cost]} for i in range(4)]
    content = {
        "schema": 1,
        "model": "vgg19",
        "device": "cuda",
        "device_name": "Toy GPU",
        "device_memory_bytes": 2**34,
        "layers": layers,
        "inputs": [{"shape": [3, 32, 32], "dtype": "float32"}],
    }
    path = tmp_path_factory.mktemp("honest") / "hostile.profile.json"
    Profile.model_validate(content).save(path, force=False)
    plan = pplan.import_plan("2,2", path, schedule="gpipe", mini_batch=8, micro_batches=4)
    return json.loads(path.read_text()), json.loads(plan.to_json())


def written(folder: Path, profile: Content, plan: Content) -> None:
    folder.mkdir()
    (folder / PROFILE).write_text(json.dumps(profile))
    if plan["profile"]["file"] == PROFILE:
        names = "\n".join(layer["name"] for layer in profile["layers"])
        plan["profile"] |= {
            "sha256": sha256((folder / PROFILE).read_bytes()),
            "layers_sha256": sha256(names.encode(errors="surrogatepass")),
        }
    (folder / PLAN).write_text(json.dumps(plan))
    (folder / "hostile.txt").write_text(f"balance = {ESCAPES}")
    (folder / "hostile.toml").write_text(
        '[[device]]\nname = "\\u001b[31m\\u009b\\u202e"\nmemory = "1GiB"\ncount = 2\n'
        '[[level]]\nname = "\\u001b]0;a\\u0007"\nbandwidth = "1GB/s"\n'
    )
    (folder / "hostile.schedule").write_text(
        f"name: mine\nsource: {ESCAPES}\ndevice i: (F B)*m  # __import__('os').system('touch owned')\n"
    )
    (folder / "evil.py").write_text("open('owned', 'w').close()\nmake = loss = print\n")
    evil = folder / "evil_model"
    evil.mkdir()
    (evil / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "auto_map": {"AutoModel": "evil.Model"}})
    )
    (evil / "evil.py").write_text("open('../owned', 'w').close()\n")


@pytest.fixture(scope="module")
def tried(honest: tuple[Content, Content], tmp_path_factory: pytest.TempPathFactory) -> list[Ran]:
    """All commands on all files, in one process."""
    root = tmp_path_factory.mktemp("hostile")
    cases: list[tuple[str, list[str], Path]] = []
    every = [command for own in COMMANDS.values() for command in own]
    quick = [command for command in every if command[0] != "profile"]
    # What is no file is refused where it is read, whatever else is asked.
    by_file = {(own[0], *(word for word in own if "hostile" in word)): own for own in reversed(quick)}
    for number, (about, change) in enumerate((CODE | ODD).items()):
        profile, plan = json.loads(json.dumps(honest))
        change(profile, plan)
        if profile.get("loss") and not profile["loss"]["costs"]:
            profile["loss"]["costs"] = profile["layers"][0]["costs"]
        folder = root / f"odd{number}"
        written(folder, profile, plan)
        commands = every if about in ("a command", "every text") else quick if about in ODD else BUILDS
        cases += [(about, command, folder) for command in commands]
    for number, (about, text) in enumerate(BROKEN.items()):
        folder = root / f"broken{number}"
        written(folder, *json.loads(json.dumps(honest)))
        for name in (PROFILE, PLAN, "hostile.txt", "hostile.toml", "hostile.schedule"):
            (folder / name).write_text(text)
        cases += [(about, command, folder) for command in by_file.values()]
    asked, found = root / "cases.json", root / "found.json"
    asked.write_text(json.dumps([(arguments, str(folder)) for _, arguments, folder in cases]))
    environment = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")}
    subprocess.run(
        [sys.executable, str(DRIVER), str(asked), str(found)],
        env=environment
        | {
            "HOSTILE_ROOT": str(root),
            "PPLAN_CACHE": str(root / "cache"),
            "TMPDIR": str(root),
            "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONPATH": os.pathsep.join(str(folder) for folder in sorted(root.glob("odd*"))[:1]),
            "COLUMNS": "100",
            "HOME": str(root),
            "TORCHINDUCTOR_CACHE_DIR": str(root / "inductor"),
        },
        timeout=900,
        check=True,
    )
    results = json.loads(found.read_text())
    return [Ran(*case, **result) for case, result in zip(cases, results, strict=True)]


def test_every_verb_is_tried() -> None:
    """A new verb has to be added here; one without commands takes no file."""
    assert {verb for verb, _ in list_verbs(root)} == set(COMMANDS)
    assert {verb for verb, commands in COMMANDS.items() if not commands} == READS_NOTHING


@pytest.mark.slow
def test_nothing_is_run_and_nothing_written_elsewhere(tried: list[Ran]) -> None:
    for ran in tried:
        assert ran.seen == [], f"{ran.seen}\n{ran}"
        assert not (ran.folder / "owned").exists(), str(ran)
        assert not list(ran.folder.parent.glob("owned")), str(ran)


@pytest.mark.slow
def test_all_end_in_two_lines_of_ours(tried: list[Ran]) -> None:
    for ran in tried:
        told = (0, 2, 3, 4) if ran.arguments[0] == "lint" else (0, 2, 3)
        assert ran.status in told, str(ran)
        assert "Traceback" not in ran.err, str(ran)
        if ran.status == 2:
            assert "pplan: " in ran.err, str(ran)
        is_default = ran.about == "nothing" and ran.arguments[:2] == ["machine", "show"]
        if ran.about in BROKEN and "--profile" not in ran.arguments and not is_default:
            assert ran.status == 2, str(ran)


@pytest.mark.slow
def test_what_builds_the_model_refuses_it(tried: list[Ran]) -> None:
    for ran in tried:
        a_script_names_no_loss = "loss" in ran.about and ran.arguments[0] == "export"
        if ran.about in CODE and ran.arguments in BUILDS and not a_script_names_no_loss:
            if ran.about in COULD_BE_KNOWN:
                assert ran.arguments[0] == "export" or "'none' ()" in ran.err, str(ran)
                continue
            assert ran.status == 2, str(ran)
            assert "check: processes" not in ran.err, str(ran)
            assert "loss" in ran.about or not (ran.folder / "train.py").exists(), str(ran)


@pytest.mark.parametrize(
    "name", ["evil", "hf:evil_model", "hf:./evil_model", "evil_model/config.json", "evil:make"]
)
def test_names_that_are_no_models_are_refused_where_they_are_built(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, honest: tuple[Content, Content]
) -> None:
    """Which no process without torch can tell: nothing here of the name is looked at."""
    profile, plan = json.loads(json.dumps(honest))
    written(tmp_path / "here", profile, plan)
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.syspath_prepend(str(tmp_path / "here"))
    found = list(sys.path)
    with pytest.raises(ModelError):
        load_model(name, known_only=True)
    assert not Path("owned").exists()
    assert sys.path == found
    with pytest.raises(ModelError, match="a file's word runs no code"):
        _load_model(ModelSpec(name="evil:make"))
    with pytest.raises(ModelError, match="has no model"):
        _load_model(ModelSpec(name="evil"))


@pytest.mark.slow
def test_a_loss_is_imported_only_where_the_user_names_it() -> None:
    spec = ModelSpec(
        name="squeezenet1_1", input_shape=[3, 64, 64], classes=2, loss="evil:loss", by_user=("other:loss",)
    )
    with pytest.raises(ModelError, match="loss 'evil:loss': a file's word runs no code"):
        _load_model(spec)


@pytest.mark.slow
def test_another_model_than_the_profiled_one_is_refused() -> None:
    spec = ModelSpec(
        name="squeezenet1_1", input_shape=[3, 64, 64], classes=2, layers_sha256="0" * 64, profiled="a\x1bb"
    )
    with pytest.raises(
        ModelError, match=r"squeezenet1_1 is not the model that was profiled as 'a\\x1bb': it has"
    ):
        _load_model(spec)


def test_what_the_user_named_is_no_part_of_a_jobs_file() -> None:
    spec = ModelSpec(name="zoo:make", by_user=("zoo:make",))
    assert "by_user" not in json.loads(Job.model_construct(model=spec).model_dump_json())["model"]


@pytest.mark.slow
def test_the_name_is_told_escaped_with_what_to_type(tried: list[Ran]) -> None:
    said = {ran.about: ran.err for ran in tried if ran.arguments == BUILDS[0]}
    assert "the profile names the model 'os:system': a file's word runs no code" in said["a command"]
    assert "--model os:system --set 'command=touch owned'" in said["a command"]
    assert r"'\u043es:system'" in said["a look-alike"]
    assert "--model package.module:factory" in said["a look-alike"]
    assert "--model evil:make" in said["a factory"]
    assert "--loss evil:loss" in said["a loss"]


@pytest.mark.slow
def test_no_terminal_is_steered(tried: list[Ran]) -> None:
    for ran in tried:
        for text in (ran.out, ran.err):
            steering = {c for c in text if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp")} - {"\n", "\t"}
            assert not steering, f"{steering}\n{ran}"


@pytest.mark.slow
def test_scripts_hold_no_code_of_a_file(tried: list[Ran]) -> None:
    scripts = [path for ran in tried for path in ran.folder.glob("train.py")]
    assert scripts
    for path in set(scripts):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        imported = {
            name.split(".")[0]
            for node in ast.walk(tree)
            for name in (
                [alias.name for alias in node.names]
                if isinstance(node, ast.Import)
                else [node.module or ""]
                if isinstance(node, ast.ImportFrom)
                else []
            )
        }
        assert imported <= {
            "functools",
            "gc",
            "os",
            "sys",
            "pathlib",
            "typing",
            "collections",
            "torch",
            "torchvision",
            "pplan",
        }
        built = [
            node.args[0].value
            for node in ast.walk(tree)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("load_model", "get_model")
            and isinstance(node.args[0], ast.Constant)
        ]
        assert len(built) == 1
        assert built[0] in ("vgg19", "hf:gpt2", "evil", "hf:evil_model")
    for path in {path for ran in tried for path in ran.folder.glob("*.sh")}:
        subprocess.run(["bash", "-n", str(path)], check=True)


def test_plans_of_the_user_may_name_code(honest: tuple[Content, Content]) -> None:
    """Loading is no building: such files are read."""
    profile, plan = json.loads(json.dumps(honest))
    model("zoo:make", depth=3)(profile, plan)
    assert Profile.model_validate(profile).settings == {"depth": 3}
    assert Plan.model_validate(plan).model == "zoo:make"
