"""A file of costs becomes a profile: told by its content, honest about what it does not say."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pplan.cost_models.errors import FileError, PplanError, UsageError
from pplan.profiler.imports import import_profile
from pplan.profiler.profile_file import Profile
from pplan.profiler.profile_options import ProfileImportOptions

TABLE = "name,forward_ms,backward_ms,activation_bytes,parameter_bytes\nembed,1,2,4000,800\nhead,3,6,400,80\n"
SIZES = (
    "name,micro_batch_size,forward_ms,backward_ms,activation_bytes,parameter_bytes,saved_bytes\n"
    "a,1,1,2,100,8,50\na,4,3,6,400,8,200\nb,1,1,2,100,8,50\nb,4,2,4,400,8,200\n"
)


def imported(folder: Path, text: str, name: str = "net.x.txt", **options: object) -> Profile:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return import_profile(path, replace(ProfileImportOptions(), **options))  # type: ignore[arg-type]


def test_a_graph(tmp_path: Path, residual: str) -> None:
    profile = imported(tmp_path, residual, micro_batch_size=4)
    assert (profile.model, profile.device, profile.device_name) == ("net", "unknown", "")
    assert profile.device_memory_bytes is None
    assert profile.input_bytes_per_sample == 100
    assert profile.whole == []
    assert profile.scales_with_samples
    assert profile.notes == [
        "imported from net.x.txt, a PipeDream graph of 9 nodes",
        "loading the data, 9.00 ms in the graph, is not counted",
        "the graph has no saved bytes: each operation is taken to save its output, and a stage keeps its "
        "input besides",
        "there is one micro-batch size, 4: at any other, costs scale with the samples, which flatters small "
        "ones",
        "the device, its launch times and workspace are not in the file; solve takes `gpu` or `memory_bytes`",
    ]
    costs = profile.chain().at(1)
    assert costs.forward_seconds.sum() == pytest.approx(7.75e-3 / 4)
    assert costs.input_bytes == 100
    assert Profile.parse(profile.to_json(), "again") == profile


def test_a_name_that_is_too_long_is_refused(tmp_path: Path) -> None:
    name, figures = "x" * 3_000_000, "forward_compute_time=1, backward_compute_time=2, activation_size=3"
    graph = f"node1 -- {name} -- {figures}, parameter_size=4\nnode2 -- b -- {figures}, parameter_size=4\n"
    with pytest.raises(FileError) as refused:
        imported(tmp_path, f"{graph}\tnode1 -- node2\n", micro_batch_size=4)
    says = "name: String should have at most 10000 characters"
    assert says in refused.value.what
    content = json.loads(imported(tmp_path, TABLE).to_json())
    content["layers"][1]["name"] = name
    with pytest.raises(FileError, match=f"^net.profile.json: layers.1.{says}") as refused:
        Profile.parse(json.dumps(content), "net.profile.json")
    assert len(str(refused.value)) < 1_000


def test_a_graph_of_unknown_batch_is_said_to_be_pipedreams(tmp_path: Path, residual: str) -> None:
    profile = imported(
        tmp_path, residual, granularity="fine", model="mine", dtype="bfloat16", tensor_parallel=2
    )
    assert profile.micro_batch_sizes == [128]
    assert any("128 is assumed" in note and "`micro_batch_size`" in note for note in profile.notes)
    assert (profile.granularity, profile.model, profile.dtype) == ("fine", "mine", "bfloat16")
    assert profile.tensor_parallel == 2
    assert len(profile.layers) == 8


def test_blocks_that_cannot_be_told_apart_point_to_fine(tmp_path: Path, residual: str) -> None:
    skip = residual + "\tnode1 -- node9\n"
    profile = imported(tmp_path, skip, micro_batch_size=4)
    assert len(profile.layers) == 1
    assert any("granularity='fine'" in note for note in profile.notes)


def test_tables(tmp_path: Path) -> None:
    by_csv = imported(tmp_path, TABLE)
    assert by_csv.micro_batch_sizes == [1]
    assert any("1 is assumed" in note for note in by_csv.notes)
    assert any("no saved_bytes" in note for note in by_csv.notes)
    assert by_csv.edges == [("embed", "head")]
    rows = [
        dict(zip(TABLE.splitlines()[0].split(","), [n, f, b, a, p], strict=True))
        for n, f, b, a, p in [("embed", 1, 2, 4000, 800), ("head", 3, 6, 400, 80)]
    ]
    by_json = imported(tmp_path, "\ufeff" + json.dumps(rows), "net.x.txt")
    assert by_json == by_csv
    assert imported(tmp_path, json.dumps({"layers": rows})) == by_csv
    sized = imported(tmp_path, TABLE, micro_batch_size=16)
    assert sized.chain().at(8).forward_seconds.tolist() == pytest.approx([0.5e-3, 1.5e-3])


def test_several_sizes_are_interpolated(tmp_path: Path) -> None:
    profile = imported(tmp_path, SIZES)
    assert not profile.scales_with_samples
    assert not any("scale" in note or "saved" in note or "assumed" in note for note in profile.notes)
    chain = profile.chain()
    assert chain.at(2).forward_seconds.tolist() == pytest.approx([1e-3 + 2e-3 / 3, 1e-3 + 1e-3 / 3])
    assert not chain.reaches(8)


def test_options_that_do_not_go_with_the_file(tmp_path: Path, residual: str) -> None:
    with pytest.raises(UsageError, match=r"granularity='fine': .* is a table"):
        imported(tmp_path, TABLE, granularity="fine")
    with pytest.raises(UsageError, match=r"micro_batch_size=8: .* has a column"):
        imported(tmp_path, SIZES, micro_batch_size=8)
    with pytest.raises(UsageError, match="format='xml': not known"):
        imported(tmp_path, residual, format="xml")
    with pytest.raises(UsageError, match="granularity='coarse': not known"):
        imported(tmp_path, residual, granularity="coarse")
    with pytest.raises(UsageError, match="dtype 'int8' is unknown"):
        imported(tmp_path, residual, dtype="int8")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "is empty"),
        (" \n\t\n", "is empty"),
        ("hello world", "line 1: 'hello world' begins no format that is known"),
        ('{"schema": 1, "layers": []}', "this is a profile of pplan already"),
        ('{"schema": 1, "prediction": {}}', "this is a plan of pplan already"),
        (
            TABLE.splitlines()[0] + "\na,0,0,1,1",
            "all layers together take 0 s at micro-batch size 1, it must be at least 1e-12 s",
        ),
    ],
)
def test_files_that_are_no_costs(tmp_path: Path, text: str, what: str) -> None:
    with pytest.raises(FileError) as caught:
        imported(tmp_path, text)
    assert caught.value.what == f"{tmp_path / 'net.x.txt'}: {what}"
    assert caught.value.hint


def test_a_profile_is_imported_already(tmp_path: Path) -> None:
    profile = imported(tmp_path, TABLE)
    with pytest.raises(FileError, match="this is a profile of pplan already"):
        imported(tmp_path, profile.to_json())


def test_the_format_can_be_named(tmp_path: Path, residual: str) -> None:
    with pytest.raises(FileError, match="line 1: unknown column"):
        imported(tmp_path, residual, format="csv")
    with pytest.raises(FileError, match="line 1: not JSON"):
        imported(tmp_path, residual, format="json")
    with pytest.raises(FileError, match="line 1: 'name,forward_ms"):
        imported(tmp_path, TABLE, format="pipedream")


def test_sums_past_a_profiles_bounds_are_refused(tmp_path: Path) -> None:
    """Each figure is within them, the block's sum is not."""
    figures = "forward_compute_time=1, backward_compute_time=1, activation_size=9e18, parameter_size=0"
    text = "\n".join([f"{name} -- Op() -- {figures}" for name in "abc"] + ["a -- b", "a -- c", "b -- c"])
    with pytest.raises(FileError, match="less than"):
        imported(tmp_path, text)


FIGURES = "forward_compute_time=1, backward_compute_time=2, activation_size=8, parameter_size=4"
PIECES = [
    *(
        "a",
        "b",
        " -- ",
        "\n",
        "\t",
        ",",
        "=",
        "[",
        "]",
        "{",
        "}",
        '"',
        "-1",
        "nan",
        "1e999",
        "\x00",
        "é",
        ";",
    ),
    *(*TABLE.splitlines(), "Input", "name", "stage_id=", '[{"name": "a"}]', FIGURES, f"a -- Op -- {FIGURES}"),
]


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.sampled_from(PIECES), max_size=12).map("".join),
    st.sampled_from([None, "pipedream", "csv", "json"]),
)
def test_no_file_is_a_defect(tmp_path_factory: pytest.TempPathFactory, text: str, form: str | None) -> None:
    folder = tmp_path_factory.getbasetemp()
    try:
        profile = imported(folder, text, "any.txt", format=form)
    except PplanError as error:
        assert error.hint  # noqa: PT017  most such files are refused
    else:
        assert profile.chain().names


@pytest.mark.slow
def test_it_needs_no_torch() -> None:
    code = "import sys, pplan.profiler.imports; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
