"""What an earlier run has measured is not measured again; what is another thing is."""

from __future__ import annotations

import copy
import dataclasses
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pplan
from pplan.cost_models.arguments import list_declarations
from pplan.cost_models.text_files import add_hash
from pplan.profiler import cache
from pplan.profiler.cache import Request, cache_folder
from pplan.profiler.measure import profile_model
from pplan.profiler.models import from_module
from pplan.profiler.passes import LayerStamps
from pplan.profiler.profile_file import Interrupted, Profile, misses_whole
from pplan.profiler.profile_options import ProfileOptions
from pplan.profiler.size_sweep import Progress
from pplan.profiler.user_model import LoadedModel

INPUT = torch.ones(2, 4)


@pytest.fixture(autouse=True)
def keeps_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of a few microseconds vary too much to add up."""
    monkeypatch.setattr(cache, "misses_whole", lambda _: False)


def model(width: int = 8) -> nn.Module:
    return nn.Sequential(nn.Linear(4, width), nn.ReLU(), nn.Linear(width, 4))


class Renamed(nn.Sequential):
    pass


class Doubles(nn.Module):
    factor = 2.0

    def forward(self, given: Tensor) -> Tensor:
        return given * self.factor


def kept(
    module: nn.Module | LoadedModel | None = None, given: object = INPUT, **options: Any
) -> tuple[Profile, list[str]]:
    """The profile, and what was said."""
    said: list[str] = []
    loaded = module if isinstance(module, LoadedModel) else (module or model(), given)
    own = {name: value for name, value in options.items() if name in list_declarations(ProfileOptions)}
    asked = ProfileOptions(**{"micro_batch_sizes": [1], "cache": True, "device": "cpu", **own})
    measuring = {"rounds": 1} | {name: value for name, value in options.items() if name not in own}
    return profile_model(loaded, asked, remark=said.append, **measuring), said


def is_hit(said: list[str]) -> bool:
    return any(text.startswith("Taken from the cache of 2") for text in said)


def after(rounds: int) -> Callable[[Progress], None]:
    """Presses Ctrl-C when so many rounds were begun, at any size."""
    begun = 0

    def tell(now: Progress) -> None:
        nonlocal begun
        begun += now.doing.startswith("round")
        if begun > rounds:
            raise KeyboardInterrupt

    return tell


def test_the_same_again_is_taken_from_the_cache(own_cache: Path) -> None:
    first, said = kept()
    assert not said
    again, said = kept()
    assert said == [f"Taken from the cache of {first.made_by.time}; `cache=False` measures anew"]
    assert again == first
    (file,) = own_cache.iterdir()
    assert Profile.load(file) == first
    assert file.name.endswith(".profile.json")


def test_names_and_values_of_weights_do_not_matter() -> None:
    first, _ = kept()
    other = copy.deepcopy(model())
    renamed, said = kept(LoadedModel(other, "another", from_module(other, INPUT).example))
    assert is_hit(said)
    assert renamed == first.model_copy(update={"model": "another"})
    assert is_hit(kept(given=torch.zeros(3, 4))[1])


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (lambda: model(width=9), {}),
        (lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)), {}),
        (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(inplace=True), nn.Linear(8, 4)), {}),
        (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4, bias=False)), {}),
        (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4).requires_grad_(False)), {}),
        (lambda: model().eval(), {}),
        (model, {"given": torch.ones(2, 3, 4)}),
        (model, {"dtype": "float64"}),
        (model, {"loss": "mse"}),
        (model, {"seed": 1}),
        (model, {"amp": "bf16"}),
        (model, {"keep_together": ["0", "1"]}),
        (model, {"micro_batch_sizes": [3]}),
        (model, {"rounds": 2}),
        (model, {"parts": False}),
        (model, {"memory_bytes": 2**40}),
    ],
)
def test_what_is_another_thing_is_measured(module: Callable[[], nn.Module], options: dict[str, Any]) -> None:
    kept()
    assert not is_hit(kept(module(), **options)[1])
    assert is_hit(kept(module(), **options)[1])


def test_settings_and_code_of_the_users_modules_count(monkeypatch: pytest.MonkeyPatch) -> None:
    def made() -> nn.Module:
        return nn.Sequential(nn.Linear(4, 4), Doubles())

    kept(made())
    assert is_hit(kept(made())[1])
    other = made()
    other[1].factor = 3.0  # type: ignore[index]
    assert not is_hit(kept(other)[1])
    monkeypatch.setattr(Doubles, "factor", 4.0)
    assert not is_hit(kept(made())[1])
    monkeypatch.setattr(Doubles, "factor", 2.0)
    assert is_hit(kept(made())[1])
    monkeypatch.setattr(Doubles, "forward", nn.Identity.forward)
    assert not is_hit(kept(made())[1])


def test_a_function_that_a_module_holds_counts() -> None:
    given = torch.ones(2, 3, 4)
    kept(nn.Sequential(nn.TransformerEncoderLayer(4, 1, 4, activation="gelu")), given)
    assert not is_hit(kept(nn.Sequential(nn.TransformerEncoderLayer(4, 1, 4)), given)[1])


def test_threads_count() -> None:
    kept()
    before = torch.get_num_threads()
    torch.set_num_threads(before + 1)
    try:
        assert not is_hit(kept()[1])
    finally:
        torch.set_num_threads(before)


def test_a_larger_budget_measures_anew() -> None:
    small = Request(sizes=None, budget_seconds=10.0, rounds=None, parts=True, memory_bytes=None)
    large = small.model_copy(update={"budget_seconds": 20.0})
    assert (large.answers(small), small.answers(large), small.answers(small)) == (True, False, True)
    assert not small.answers(small.model_copy(update={"sizes": (1, 2)}))
    fixed = small.model_copy(update={"rounds": 2})
    assert fixed.answers(fixed.model_copy(update={"budget_seconds": 20.0}))


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff", b'{"schema": 1, "layers": []}'])
def test_a_damaged_entry_is_replaced(own_cache: Path, content: bytes) -> None:
    kept()
    (file,) = own_cache.iterdir()
    file.write_bytes(content)
    profile, said = kept()
    assert not said
    assert Profile.load(file) == profile


def test_a_poisoned_entry_is_not_taken(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither one that was edited since it was written, nor one that another user wrote."""
    kept()
    (file,) = own_cache.iterdir()
    edited = file.read_text().replace('"forward_seconds": ', '"forward_seconds": 9')
    file.write_text(edited)
    assert not is_hit(kept()[1])
    write_with_hash(file, edited)
    assert is_hit(kept()[1])
    monkeypatch.setattr(os, "geteuid", lambda: file.stat().st_uid + 1)
    monkeypatch.setattr(cache, "SUPERUSER", -1)
    assert not is_hit(kept()[1])


def write_with_hash(file: Path, text: str) -> None:
    """As one that pplan wrote."""
    content = json.loads(text)
    del content["made_by"]["content_sha256"]
    file.write_text(add_hash(json.dumps(content, indent=1)))


def test_nothing_is_kept_unless_asked_for_nor_on_meta(own_cache: Path) -> None:
    kept(cache=False)
    kept(device="meta", rounds=None, resume=True)
    assert not own_cache.exists()


def test_a_folder_that_cannot_be_written_is_a_remark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("PPLAN_CACHE", str(tmp_path / "file" / "cache"))
    profile, (said,) = kept()
    assert said.startswith("Nothing is kept for a later run: ")
    assert profile.micro_batch_sizes == [1]


def test_a_journal_or_profile_that_cannot_be_written_is_a_remark(own_cache: Path) -> None:
    kept()
    (file,) = own_cache.iterdir()
    file.unlink()
    file.mkdir()
    Path(str(file).replace(".profile.json", ".journal")).mkdir()
    _, said = kept()
    assert [text.split(":")[0] for text in said] == [
        "No journal is kept for `resume`",
        "Not put into the cache",
    ]


def test_where_the_cache_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert cache_folder() == Path(os.environ["PPLAN_CACHE"])
    monkeypatch.delenv("PPLAN_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_folder() == tmp_path / "pplan"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_folder() == tmp_path / "home" / ".cache" / "pplan"


def test_an_interruption_holds_what_there_is_and_resume_goes_on(own_cache: Path) -> None:
    with pytest.raises(Interrupted) as caught:
        kept(rounds=3, micro_batch_sizes=[1, 2, 4], progress=after(5))
    half = caught.value.profile
    assert [(whole.micro_batch_size, whole.rounds) for whole in half.whole] == [(1, 3), (2, 2)]
    assert half.notes[0] == (
        "interrupted after 5 rounds at micro-batch size 1, 2; the same with `resume` continues"
    )
    assert [(left.micro_batch_size, left.reason) for left in half.unmeasured] == [(4, "interrupted")]
    assert [file.suffix for file in own_cache.iterdir()] == [".journal"]
    whole, said = kept(rounds=3, micro_batch_sizes=[1, 2, 4], resume=True)
    # Three passes in each of five rounds.
    assert said == ["Continuing an interrupted profile: 15 passes of it are kept"]
    assert "continued: 15 of its passes are those of an interrupted run" in whole.notes
    assert [(each.micro_batch_size, each.rounds) for each in whole.whole] == [(1, 3), (2, 3), (4, 3)]
    assert whole.whole[0] == half.whole[0]
    for layer, before in zip(whole.layers, half.layers, strict=True):
        assert layer.costs[0] == before.costs[0]
        assert layer.costs[1].saved_bytes == before.costs[1].saved_bytes
    assert [file.suffix for file in own_cache.iterdir()] == [".json"]


def test_an_interruption_before_the_first_round_leaves_nothing(own_cache: Path) -> None:
    with pytest.raises(KeyboardInterrupt) as caught:
        kept(progress=after(0))
    assert not isinstance(caught.value, Interrupted)
    assert not list(own_cache.iterdir())


def test_without_resume_an_interrupted_profile_is_begun_anew() -> None:
    with pytest.raises(Interrupted):
        kept(rounds=2, progress=after(1))
    _, (said,) = kept(rounds=2)
    assert said == (
        "An interrupted profile of this, of 3 passes, is begun anew; `resume` would have continued it"
    )
    assert kept(model(9), resume=True)[1] == [
        "There is no interrupted profile of this to resume: measuring from the beginning"
    ]


def test_without_a_cache_an_interruption_promises_nothing() -> None:
    with pytest.raises(Interrupted) as caught:
        kept(rounds=2, cache=False, progress=after(1))
    assert caught.value.profile.notes[0] == "interrupted after 1 rounds at micro-batch size 1"


def test_all_sittings_together_keep_the_budget() -> None:
    """What a journal tells of size 1 has used the budget up: only what it holds is in the profile."""
    with pytest.raises(Interrupted):
        kept(rounds=None, micro_batch_sizes=[1, 2], budget_seconds=1e6, progress=after(3))
    profile, _ = kept(rounds=None, micro_batch_sizes=[1, 2], budget_seconds=1e-9, resume=True)
    assert [(each.micro_batch_size, each.rounds) for each in profile.whole] == [(1, 3)]
    assert [(left.micro_batch_size, left.reason) for left in profile.unmeasured] == [(2, "budget")]


def test_a_pass_that_was_done_is_not_done_again(own_cache: Path) -> None:
    """Killed between the passes of a round: the round is finished."""
    with pytest.raises(Interrupted):
        kept(rounds=4, micro_batch_sizes=[1], progress=after(2))
    (file,) = own_cache.iterdir()
    lines = file.read_bytes().splitlines(keepends=True)
    # Behind key and bytes: three passes and the round; of the second the first pass only.
    file.write_bytes(b"".join(lines[:7]))
    profile, said = kept(rounds=4, micro_batch_sizes=[1], resume=True)
    assert said == ["Continuing an interrupted profile: 4 passes of it are kept"]
    assert [each.rounds for each in profile.whole] == [4]


def test_on_a_device_the_leads_are_found_again(device_clock: Any, takes: Any) -> None:
    layers = nn.Sequential(*(takes(device_clock, 1.0, 2.0) for _ in range(2)))
    options = {"rounds": 4, "clock": device_clock}
    with pytest.raises(Interrupted):
        kept(layers, progress=after(2), **options)
    device_clock.held_back.clear()
    profile, _ = kept(layers, resume=True, **options)
    assert max(device_clock.held_back) > 0
    assert [each.rounds for each in profile.whole] == [4]
    assert [layer.costs[0].forward_seconds for layer in profile.layers] == [1.0, 1.0]
    assert [layer.costs[0].backward_seconds for layer in profile.layers] == [2.0, 2.0]


def test_in_segments_an_interruption_holds_the_sizes_before() -> None:
    def press_at_two(now: Progress) -> None:
        if now.micro_batch_size == 2:
            raise KeyboardInterrupt

    wide = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    options = {"given": torch.ones(2, 64), "memory_bytes": 100_000, "micro_batch_sizes": [1, 2]}
    with pytest.raises(Interrupted) as caught:
        kept(wide, progress=press_at_two, **options)
    profile = caught.value.profile
    assert (profile.micro_batch_sizes, profile.whole) == ([1], [])
    assert "interrupted: larger micro-batch sizes were not measured" in profile.notes
    whole, said = kept(wide, **options)
    assert (whole.micro_batch_sizes, said) == ([1, 2], [])
    assert is_hit(kept(wide, **options)[1])


def imported(folder: Path, **files: str) -> nn.Module:
    """What `build` of the file `own_model` makes, as a new process would import it."""
    for name, text in files.items():
        (folder / f"{name}.py").write_text(text)
        sys.modules.pop(name, None)
    importlib.invalidate_caches()
    module: nn.Module = importlib.import_module("own_model").build()
    return module


OWN_MODEL = """
from torch import nn
import own_layers
def build():
    return nn.Sequential(nn.Linear(4, 4), own_layers.Scales())
"""
OWN_LAYERS = """
from torch import nn
class Scales(nn.Module):
    def forward(self, given):
        from own_arithmetic import scale
        return scale(given)
"""


def test_functions_in_other_files_of_the_users_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    files = {"own_arithmetic": "def scale(given):\n    return given * 2\n", "own_layers": OWN_LAYERS}
    files["own_model"] = OWN_MODEL
    kept(imported(tmp_path, **files))
    assert is_hit(kept(imported(tmp_path, **files))[1])
    changed = files | {"own_arithmetic": "def scale(given):\n    return (given * 2).exp()\n"}
    assert not is_hit(kept(imported(tmp_path, **changed))[1])
    assert is_hit(kept(imported(tmp_path, **changed))[1])
    # What nothing imports does not count.
    (tmp_path / "own_other.py").write_text("other = 1\n")
    assert is_hit(kept(imported(tmp_path, **changed))[1])


REGISTERED = """
from torch import nn
import own_registry, own_settings
class Scales(nn.Module):
    def __init__(self, config):
        super().__init__()
        self.config = config
    def forward(self, given):
        for _ in range(self.config.times):
            given = own_registry.FUNCTIONS["scale"](given) + own_settings.OFFSET
        return given
def build():
    import types, own_functions
    return nn.Sequential(nn.Linear(4, 4), Scales(types.SimpleNamespace(times=2)))
"""


@pytest.mark.parametrize(
    ("file", "before", "now"),
    [
        ("own_functions", "* 2", "* 3"),
        ("own_settings", "OFFSET = 1", "OFFSET = 2"),
        ("own_model", "times=2", "times=3"),
    ],
)
def test_what_forward_reaches_by_globals_and_attributes_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, file: str, before: str, now: str
) -> None:
    """A registry, a number in another file, and a configuration that the module holds."""
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    files = {
        "own_registry": "FUNCTIONS = {}\n",
        "own_settings": "OFFSET = 1\n",
        "own_functions": "import own_registry\nown_registry.FUNCTIONS['scale'] = lambda given: given * 2\n",
        "own_model": REGISTERED,
    }
    kept(imported(tmp_path, **files))
    assert is_hit(kept(imported(tmp_path, **files))[1])
    changed = files | {file: files[file].replace(before, now)}
    assert not is_hit(kept(imported(tmp_path, **changed))[1])


def test_a_value_that_is_set_in_another_module_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    files = {"own_registry": "FUNCTIONS = {'scale': lambda given: given}\n", "own_settings": "OFFSET = 1\n"}
    layers = imported(tmp_path, **files, own_functions="", own_model=REGISTERED)
    kept(layers)
    monkeypatch.setattr(sys.modules["own_settings"], "OFFSET", 5)
    assert not is_hit(kept(layers)[1])


NAMED: dict[str, Any] = {"input_shape": (3, 64, 64), "micro_batch_sizes": [1], "device": "cpu", "cache": True}


def test_a_model_by_name_is_found_without_it(own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = pplan.profile("squeezenet1_1", **NAMED, budget_seconds=1)
    said: list[str] = []
    with monkeypatch.context() as patched:
        patched.setattr("pplan.api.profiles._load_subject", None)
        assert pplan.profile("SqueezeNet1_1", **NAMED, budget_seconds=1, remark=said.append) == first
        assert is_hit(said)
        for other in ({"classes": 2}, {"seed": 1}, {"loss": "mse"}, {"micro_batch_sizes": [2]}):
            with pytest.raises(TypeError, match="not callable"):
                pplan.profile("squeezenet1_1", **{**NAMED, **other}, budget_seconds=1)
    # A file of the library was edited since: the model is built, and found by its modules.
    (link,) = own_cache.glob("*.link.json")
    content = json.loads(link.read_text())
    content["files"][next(iter(content["files"]))][0] -= 1
    link.write_text(json.dumps(content))
    with monkeypatch.context() as patched:
        patched.setattr("pplan.api.profiles._load_subject", None)
        with pytest.raises(TypeError, match="not callable"):
            pplan.profile("squeezenet1_1", **NAMED, budget_seconds=1)
    assert pplan.profile("squeezenet1_1", **NAMED, budget_seconds=1) == first


@pytest.mark.slow
def test_a_hit_by_name_loads_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys, pplan\nfrom pplan.profiler import cache\ncache.misses_whole = lambda _: False\n"
        "pplan.profile('squeezenet1_1', input_shape=(3, 64, 64), micro_batch_sizes=[1], device='cpu',"
        " cache=True, budget_seconds=1)\nprint('torch' in sys.modules)"
    )
    environment = {**os.environ, "PPLAN_CACHE": str(tmp_path)}
    command = [sys.executable, "-c", code]
    runs = [
        subprocess.run(command, capture_output=True, text=True, check=True, env=environment) for _ in range(2)
    ]
    assert [run.stdout for run in runs] == ["True\n", "False\n"]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ATEN_CPU_CAPABILITY", "default"),
        ("OMP_PROC_BIND", "close"),
        ("KMP_BLOCKTIME", "0"),
        ("MKL_CBWR", "AVX2"),
    ],
)
def test_variables_that_choose_kernels_count(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(name, raising=False)
    kept()
    monkeypatch.setenv("MY_OWN_VARIABLE", value)
    assert is_hit(kept()[1])
    monkeypatch.setenv(name, value)
    assert not is_hit(kept()[1])


@pytest.mark.parametrize("name", ["benchmark", "deterministic", "allow_tf32", "enabled"])
def test_flags_of_the_process_that_choose_kernels_count(name: str) -> None:
    kept()
    before = getattr(torch.backends.cudnn, name)
    setattr(torch.backends.cudnn, name, not before)
    try:
        assert not is_hit(kept()[1])
    finally:
        setattr(torch.backends.cudnn, name, before)
    assert is_hit(kept()[1])


def test_the_attention_that_may_run_counts() -> None:
    kept()
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]):
        assert not is_hit(kept()[1])
    assert is_hit(kept()[1])


def test_a_profile_whose_layers_miss_the_model_is_measured_again(
    own_cache: Path, clock: Any, takes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache, "misses_whole", misses_whole)
    plain = LayerStamps.times

    def measured() -> tuple[Profile, list[str]]:
        new_clock = type(clock)()
        return kept(nn.Sequential(*(takes(new_clock, 1, 2) for _ in range(2))), clock=new_clock)

    def missing_half(stamps: LayerStamps) -> Any:
        times = plain(stamps)
        return dataclasses.replace(times, forward=times.forward * 0.5, backward=times.backward * 0.5)

    with monkeypatch.context() as patched:
        patched.setattr(LayerStamps, "times", missing_half)
        profile, said = measured()
    assert profile.whole[0].closing_ratio == pytest.approx(0.5)
    assert said == [
        "Not put into the cache, a later run measures anew: the layers do not add up to the model"
    ]
    assert not list(own_cache.glob("*.profile.json"))
    whole, said = measured()
    assert (said, whole.whole[0].closing_ratio) == ([], 1.0)
    # One that an earlier version kept is not taken either.
    (file,) = own_cache.glob("*.profile.json")
    write_with_hash(file, file.read_text().replace('"closing_ratio": 1.0', '"closing_ratio": 0.67'))
    assert not is_hit(measured()[1])
    assert is_hit(measured()[1])
