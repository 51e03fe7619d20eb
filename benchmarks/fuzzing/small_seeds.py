"""The seeds as small as they can be for readers alone: half a file is read in half the time.

Of every list in a document stay the members without which it is not read, or without which a key or a kind of
value would stand nowhere in it any more: what counts is the structure.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from .documents import Path, paths, value_at
from .seeds import PLAIN, SCHEDULE, TABLE, TIED, profile

Reads = Callable[[str, bytes], bool]
"""Whether a file of this name is read."""
BLOCKS, SIZES = 2, (1, 2)
"""Of the profiles."""
ROWS = 3
"""Of the table of costs."""
ROOFLINE = """name = "my GPU"
memory = "48GiB"
bandwidth = "864GB/s"
launch = "4us"
host_launch = "6us"
float32 = 9.1e13
bfloat16 = 1.8e14
"""
CALIBRATION: dict[str, Any] = {
    "schema": 1,
    "backend": "gloo",
    "device_name": "a processor",
    "processes": 2,
    "corrections": {"overhead": 1e-5, "looped_overhead": 2e-5, "slowdown": 1.1}
    | {"latency": 1e-5, "bandwidth": 1e9},
}
_PAIR, _WHOLE = [1e-3, 2e-3], {"forward": 3e-3, "backward": 6e-3, "forward_host": 1e-5}
_MEMORY = {"static": 64, "other": 0, "saved": [8, 8], "forward": [0, 4], "backward": [4, 0]}
_COUNTED = {
    **{name: [8, 16] for name in ("saved_bytes", "saved_input_bytes", "output_bytes")},
    "loss_saved_bytes": 8,
    "loss_output_bytes": 4,
    "memory": _MEMORY,
    "peak_bytes": 128,
    "loss_workspace": {"forward": 4, "backward": 8},
}
JOURNAL: tuple[dict[str, Any], ...] = (
    {"journal": 1, "key": "key"},
    {"size": 2, "counted": _COUNTED},
    {"size": 2, "pass": "layers", "seconds": {"forward": _PAIR, "backward": _PAIR, "loss": _WHOLE}},
    {"size": 2, "pass": "whole", "seconds": _WHOLE},
    {"size": 2, "pass": "parts", "seconds": {"input": _PAIR, "weight": _PAIR, "pending_bytes": [0, 8]}},
    {"size": 2, "round": 0.25},
    {"size": 2, "without_parts": "a reason"},
)
"""Of two layers."""
FORMULAS = {
    "loop.schedule": """name: loop  # with lists
source: a paper
places: loop
let f = each c from 0 to v-1 (F.c*p)
let b = each c from v-1 to 0 (B.c*p)
device i: f*min(v*m, (v-1)*p + 2*(p-1-i)) (f b)*(v*m - ((v-1)*p + 2*(p-1-i)))
  b*min(v*m, (v-1)*p + 2*(p-1-i))
""",
    "line.schedule": """name: line
device 0: F*m each k from m-1 to 0 (B[k] W[k])
device i: F*(p-i) (B F)*i (B W F)*(m-i) B*m W*m
""",
}
"""Schedules by formulas: SCHEDULE lists its actions."""
MORE_KINDS = {
    "schedule": (SCHEDULE, *FORMULAS),
    "roofline": ("gpu.toml",),
    "calibration": ("machine.calibration.json",),
    "journal": ("profile.journal",),
}
"""Seeds of files that only the readers are tried on, by kind."""
FEW = 2
"""Members of a list, of which one is not the first and one not the last."""


def small_seeds(seeds: Mapping[str, bytes], reads: Reads) -> dict[str, bytes]:
    """Of the same names, and of MORE_KINDS."""
    content = profile(blocks=BLOCKS, sizes=SIZES)
    small = dict(seeds)
    small[TIED] = json.dumps(content).encode()
    small[PLAIN] = json.dumps(content | {"tied": []}).encode()
    small["table.csv"] = "".join(TABLE.splitlines(keepends=True)[: 1 + ROWS]).encode()
    small |= {"gpu.toml": ROOFLINE.encode(), "machine.calibration.json": json.dumps(CALIBRATION).encode()}
    small |= {name: text.encode() for name, text in FORMULAS.items()}
    small["profile.journal"] = "".join(f"{json.dumps(line)}\n" for line in JOURNAL).encode()
    for file, text in small.items():
        document = _document(text)
        if document is not None:
            small[file] = json.dumps(_smaller(file, document, reads), indent=1).encode()
    return small


def _document(content: bytes) -> Any:
    """The lists and objects of a file; None where it is no JSON."""
    try:
        document = json.loads(content)
    except ValueError:
        return None
    return document if isinstance(document, dict | list) else None


def _smaller(file: str, document: Any, reads: Reads) -> Any:
    """Last members are tried first: the others keep their places."""
    lists = [path for path in ([], *paths(document)) if isinstance(value_at(document, path), list)]
    wanted = set(shape(document))
    for path in sorted(lists, key=len):
        members = _length(document, path)
        for left_away in (slice(FEW, None), *(slice(at, at + 1) for at in range(members - 1, 0, -1))):
            if left_away.start >= _length(document, path):
                continue
            other = json.loads(json.dumps(document))
            del value_at(other, path)[left_away]
            if set(shape(other)) == wanted and reads(file, json.dumps(other).encode()):
                document = other
    return document


def _length(document: Any, path: Path) -> int:
    """Of a list; 0 where it is not there any more."""
    try:
        return len(value_at(document, path))
    except (LookupError, TypeError):
        return 0


def shape(content: Any, path: tuple[str, ...] = ()) -> Iterator[object]:
    """Its keys with the kinds of their values, and which lists have several members."""
    yield (*path, type(content))
    if isinstance(content, dict):
        for key, value in content.items():
            yield from shape(value, (*path, key))
    elif isinstance(content, list):
        yield (*path, len(content) >= FEW)
        for value in content:
            yield from shape(value, (*path, "*"))
