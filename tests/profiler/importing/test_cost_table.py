"""Tables of costs, CSV and JSON: the same rows from both, at one or several sizes, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest

from pplan.cost_models.errors import FileError
from pplan.profiler.imports import Row, group_rows, looks_like_csv, read_csv, read_json

HEADER = "name,forward_seconds,backward_seconds,activation_bytes,parameter_bytes"
PLAIN = {
    "name": "a",
    "forward_seconds": 0.5,
    "backward_seconds": 1,
    "activation_bytes": 64,
    "parameter_bytes": 8,
}


def without_place(rows: list[Row]) -> list[dict[str, Any]]:
    return [{key: value for key, value in vars(row).items() if key != "place"} for row in rows]


def csv(*rows: str, header: str = HEADER) -> list[Row]:
    return read_csv("\n".join([header, *rows]), "costs.csv")


def rows_of(*rows: dict[str, Any]) -> list[Row]:
    return read_json(json.dumps(list(rows)), "costs.json")


def test_csv_and_json_say_the_same() -> None:
    columns = "name,forward_ms,backward_ms,activation_bytes,parameter_bytes,saved_bytes,backward_input_ms"
    by_csv = csv('"a, b",1.5,3,1e3,12.0,,2', "", "c , 5,0,0,0,7,", header=columns)
    objects: list[dict[str, Any]] = [
        dict(zip(columns.split(","), ["a, b", 1.5, 3, 1000, 12, None, 2], strict=True)),
        dict(zip(columns.split(",")[:-1], ["c", 5, 0, 0, 0, 7], strict=True)),
    ]
    by_json = rows_of(*objects)
    wrapped = read_json(json.dumps({"layers": objects}), "costs.json")
    assert without_place(by_csv) == without_place(by_json) == without_place(wrapped)
    first, second = by_csv
    assert (first.name, first.forward_seconds, first.backward_seconds) == ("a, b", 1.5e-3, 3e-3)
    assert (first.activation_bytes, first.saved_bytes, first.backward_input_seconds) == (1000, None, 2e-3)
    assert (second.name, second.forward_seconds, second.saved_bytes) == ("c", 5e-3, 7)
    assert [row.place.at for row in by_csv] == ["line 2", "line 4"]
    assert [row.place.at for row in wrapped] == ["layers[0]", "layers[1]"]


@pytest.mark.parametrize(
    ("header", "values"),
    [
        ("Layer,Fwd (ms),Bwd [us],Activation (MB),params-KiB", "a,500,1e6,6.4e-5,0.0078125"),
        ("module,forward_time_s,backward_ns,output MiB,weights_b", "a,0.5,1e9,6.103515625e-5,8"),
        (
            "LAYER_NAME,FWD_SEC,backward time (µs),act_gb,param_gib",
            "a,0.5,1000000,6.4e-8,7.450580596923828e-9",
        ),
    ],
)
def test_units_and_other_names(header: str, values: str) -> None:
    (row,) = csv(values, header=header)
    (plain,) = csv("a,0.5,1,64,8")
    assert without_place([row])[0] | {"read_as": ()} == without_place([plain])[0]
    assert len(row.read_as) >= 4
    assert looks_like_csv(header)


def test_a_count_is_not_taken_for_bytes() -> None:
    for header in ("parameters", "weights", "output", "forward", "saved"):
        with pytest.raises(FileError, match="unknown column"):
            csv("a,1,1,1,1,1", header=f"{HEADER},{header}")
    with pytest.raises(FileError, match="has activation_bytes and activation_mb"):
        csv("a,1,1,1,1,1", header=f"{HEADER},output (MB)")
    with pytest.raises(FileError, match="activation_gib is '1e10'"):
        csv("a,1,1,1e10,1", header=HEADER.replace("activation_bytes", "activation_gib"))


@pytest.mark.parametrize("separator", [",", ";", "\t"])
def test_separators(separator: str) -> None:
    text = f"{HEADER}\r\na,1,2,3,4\r\n".replace(",", separator)
    assert looks_like_csv(text)
    (row,) = read_csv(text, "costs.csv")
    assert (row.forward_seconds, row.parameter_bytes) == (1, 4)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        (f"{HEADER}\na,1,2,3", "line 2: has 4 values for the 5 columns"),
        (f"{HEADER}\na,1,2,3,4,5", "line 2: has 6 values for the 5 columns"),
        (f"{HEADER}\na,1,2,3,4\n\nb,x,2,3,4", "line 4: forward_seconds is 'x', not a number"),
        (f"{HEADER}\na,1_0,2,3,4", "line 2: forward_seconds is '1_0', not a number"),
        (f"{HEADER}\na,1,-2,3,4", "line 2: backward_seconds is '-2', it must be finite and at least 0"),
        (f"{HEADER}\na,1,nan,3,4", "line 2: backward_seconds is 'nan', it must be finite"),
        (f"{HEADER}\na,1,2,,4", "line 2: activation_bytes is empty"),
        (f"{HEADER}\na,,2,3,4", "line 2: forward_seconds is empty"),
        (f"{HEADER}\n ,1,2,3,4", "line 2: name is '', not a text"),
        (f"{HEADER}\na,1,2,3,1e19", "line 2: parameter_bytes is '1e19', it must be at least 0 and less"),
        (f'{HEADER}\n"a,1,2,3,4', "line 2: not CSV"),
        (f"{HEADER},speed\na,1,2,3,4,5", "line 1: unknown column 'speed'"),
        (f"{HEADER},name\na,1,2,3,4,5", "line 1: column name stands twice"),
        (f"{HEADER},forward_ms\na,1,2,3,4,5", "line 1: has forward_seconds and forward_ms"),
        ("name,forward_ms\na,1", "line 1: column backward_seconds is missing"),
        (f"{HEADER},micro_batch_size\na,1,2,3,4,0", "line 2: micro_batch_size is '0', it must be a whole"),
        (
            f"{HEADER},micro_batch_size\na,1,2,3,4,2.5",
            "line 2: micro_batch_size is '2.5', it must be a whole",
        ),
        (f"{HEADER},backward_input_ms\na,1,2,3,4,2001", "line 2: backward_input takes 2.001 s, the whole"),
    ],
)
def test_csv_that_is_refused(text: str, what: str) -> None:
    with pytest.raises(FileError) as caught:
        read_csv(text, "costs.csv")
    assert caught.value.what.startswith(f"costs.csv: {what}")
    assert caught.value.hint


def test_near_columns_are_offered() -> None:
    with pytest.raises(FileError, match=r"Did you mean activation_bytes\?"):
        csv(header=HEADER.replace("activation", "activtion"))
    with pytest.raises(FileError, match=r"Did you mean forward_ms\?"):
        rows_of(PLAIN | {"forwrd_ms": 1})


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ([PLAIN, 3], "[1]: is 3, not an object"),
        ([PLAIN, [PLAIN]], "[1]: is ["),
        ([PLAIN | {"forward_seconds": True}], "[0]: forward_seconds is True, not a number"),
        ([PLAIN | {"forward_seconds": [1]}], "[0]: forward_seconds is [1], not a number"),
        ([PLAIN | {"forward_seconds": float("nan")}], "[0]: forward_seconds is nan, it must be finite"),
        ([PLAIN | {"forward_seconds": None}], "[0]: forward_seconds is empty"),
        ([PLAIN | {"activation_bytes": 2**63}], "[0]: activation_bytes is 9223372036854775808, it must be"),
        ([PLAIN | {"name": 7}], "[0]: name is 7, not a text"),
        ([{"name": "a"}], "[0]: column forward_seconds is missing"),
        ({"layers": [PLAIN, PLAIN | {"activation_bytes": -1}]}, "layers[1]: activation_bytes is -1, it must"),
        ({"layers": 7}, "layers is 7, not a list"),
        ({"rows": []}, "the whole file: unknown column 'rows'"),
        (7, "the whole file is 7, not a list"),
    ],
)
def test_json_that_is_refused(content: object, what: str) -> None:
    with pytest.raises(FileError) as caught:
        read_json(json.dumps(content), "costs.json")
    assert caught.value.what.startswith(f"costs.json: {what}")


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('[{"name": "a",\n}]', "line 2: not JSON"),
        ("[" * 100_000, "not a table of costs"),
        ('[{"activation_bytes": ' + "1" * 5000 + "}]", "not a table of costs"),
        ('[{"name": "a", "name": "b"}]', "[0]: column name stands twice"),
    ],
)
def test_text_that_is_no_json_table(text: str, what: str) -> None:
    with pytest.raises(FileError) as caught:
        read_json(text, "costs.json")
    assert caught.value.what.startswith(f"costs.json: {what}")


def test_saved_bytes_default_to_the_output() -> None:
    rows = rows_of(
        PLAIN,
        PLAIN | {"name": "b", "activation_bytes": 32, "saved_bytes": 5, "parameter_bytes": 0},
        PLAIN | {"name": "c"},
    )
    made = group_rows(rows, "costs.json", 16)
    costs = [layer.costs[0] for layer in made.layers]
    assert [cost.saved_bytes for cost in costs] == [64, 5, 64]
    # Whoever starts behind `a` keeps its output; what b's saved bytes hold of its output is not known.
    assert [cost.saved_input_bytes for cost in costs] == [0, 64, 0]
    assert made.edges == [("a", "b"), ("b", "c")]
    assert made.sizes == [16]
    assert made.notes == [
        "2 rows of 3 have no saved_bytes: it is taken to be activation_bytes, and a stage keeps its input "
        "besides"
    ]


def test_several_sizes() -> None:
    at = [
        PLAIN
        | {"name": name, "micro_batch_size": size, "forward_seconds": seconds, "activation_bytes": 8 * size}
        for name, size, seconds in [("a", 4, 0.4), ("b", 4, 1), ("a", 1, 0.2), ("b", 1, 0.5)]
    ]
    made = group_rows(rows_of(*at), "costs.json", 1)
    assert made.sizes == [1, 4]
    assert [layer.name for layer in made.layers] == ["a", "b"]
    assert [cost.forward_seconds for cost in made.layers[0].costs] == [0.2, 0.4]
    assert [cost.saved_input_bytes for cost in made.layers[1].costs] == [8, 32]


def test_the_backward_in_two_parts() -> None:
    made = group_rows(rows_of(PLAIN | {"backward_input_seconds": 0.25, "saved_bytes": 1}), "costs.json", 1)
    assert made.layers[0].costs[0].backward_weight_seconds == 0.75
    assert made.notes == []
    some = [
        PLAIN | {"backward_input_seconds": 0.25, "saved_bytes": 1},
        PLAIN | {"name": "b", "saved_bytes": 1},
    ]
    made = group_rows(rows_of(*some), "costs.json", 1)
    assert made.notes == ["1 row of 2 has no backward_input_seconds: those of the others are not used"]


@pytest.mark.parametrize(
    ("rows", "what"),
    [
        ([], "has no rows"),
        ([{}, {}], "[1]: layer 'a' stands at [0] already"),
        ([{"micro_batch_size": 2}] * 2, "[1]: layer 'a' stands at [0] already with micro_batch_size 2"),
        ([{"micro_batch_size": 2}, {"name": "b"}], "[1]: micro_batch_size is empty, and other rows have one"),
        (
            [{"micro_batch_size": 2}, {"micro_batch_size": 4}, {"name": "b", "micro_batch_size": 2}],
            "[2]: layer 'b' has the micro-batch sizes 2, the first layer 2, 4",
        ),
        (
            [{"micro_batch_size": 2}, {"micro_batch_size": 4, "parameter_bytes": 9}],
            "[1]: parameter_bytes of 'a' is 9, and 8 at [0]",
        ),
    ],
)
def test_rows_that_contradict(rows: list[dict[str, Any]], what: str) -> None:
    with pytest.raises(FileError) as caught:
        group_rows(rows_of(*(PLAIN | row for row in rows)), "costs.json", 1)
    assert caught.value.what.startswith(f"costs.json: {what}")


SHARED = f"{HEADER},tp2_forward_ms,TP2 Bwd (ms),tp2_activation_bytes,tp2_parameter_bytes"


def test_columns_of_devices_that_share_the_layer() -> None:
    one, two = csv("a,1,2,64,8,600,1200,64,4", header=SHARED)
    assert (one.tensor_parallel, one.forward_seconds, one.parameter_bytes) == (1, 1, 8)
    assert (two.tensor_parallel, two.forward_seconds, two.backward_seconds) == (2, 0.6, 1.2)
    assert (two.name, two.activation_bytes, two.parameter_bytes) == ("a", 64, 4)
    assert two.read_as == ("TP2 Bwd (ms) as tp2_backward_ms",)
    rows = csv("a,1,1,64,8,1,1,64,4", "b,1,1,64,8,1,1,64,4", header=SHARED)
    assert [row.tensor_parallel for row in rows] == [1, 2, 1, 2]
    with_more = PLAIN | {"tp4_forward_us": 1, "tp4_backward_us": 2, "tp4_output_mb": 3, "tp4_params_kb": 1}
    four = rows_of(with_more)[1]
    assert (four.tensor_parallel, four.activation_bytes, four.forward_seconds) == (4, 3_000_000, 1e-6)


@pytest.mark.parametrize(
    ("header", "row", "message"),
    [
        (f"{HEADER},tp2_forward_ms", "a,1,1,64,8,1", "line 1: column tp2_backward_seconds is missing"),
        (SHARED.replace(",tp2_parameter_bytes", ""), "a,1,1,64,8,1,1,1", "column tp2_parameter_bytes is"),
        (f"{SHARED},saved_bytes", "a,1,1,64,8,1,1,1,1,9", "line 1: column tp2_saved_bytes is missing"),
        (f"{SHARED},tp2_saved_kb", "a,1,1,64,8,1,1,1,1,9", "line 1: column saved_bytes is missing"),
        (SHARED, "a,1,1,64,8,1,,1,1", "line 2: tp2_backward_seconds is empty"),
        (SHARED, "a,1,1,64,8,-1,1,1,1", "line 2: tp2_forward_ms is '-1'"),
        (f"{SHARED},saved_mb,tp2_saved_mb", "a,1,1,64,8,1,1,1,1,9,", "line 2: tp2_saved_bytes is empty"),
        (f"{SHARED},tp2_fwd_s", "a,1,1,64,8,1,1,1,1,1", "has tp2_forward_seconds and tp2_forward_ms"),
        (f"{HEADER},tp1_forward_ms", "a,1,1,64,8,1", "unknown column 'tp1_forward_ms'"),
        (f"{HEADER},tp2_name", "a,1,1,64,8,b", "unknown column 'tp2_name'"),
        (f"{HEADER},{'tp2_' * 5000}forward_ms", "a,1,1,64,8,1", "unknown column"),
    ],
)
def test_columns_of_sharing_devices_that_cannot_be(header: str, row: str, message: str) -> None:
    with pytest.raises(FileError, match=message):
        csv(row, header=header)


def test_every_layer_has_the_same_numbers_of_sharing_devices() -> None:
    shared = {f"tp2_{name}": value for name, value in PLAIN.items() if name != "name"}
    with pytest.raises(FileError, match=r"\[1\]: column tp2_forward_seconds is missing, and \[0\] has it"):
        rows_of(PLAIN | shared, PLAIN | {"name": "b"})
    with pytest.raises(FileError, match="tp2_backward_seconds is empty"):
        rows_of(PLAIN | shared | {"tp2_backward_seconds": None})
