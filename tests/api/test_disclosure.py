"""What `show --provenance` says that a file discloses."""

from __future__ import annotations

import json

import pytest

from pplan.api.provenance import disclose


@pytest.mark.parametrize(
    ("note", "private"),
    [
        ("from https://me:secret@example.com/x", ["https://me:secret@example.com"]),
        ("at file:///data/secret/x.json", ["file:///data/secret/x.json"]),
        ("at D:/Users/me/x.json", ["D:/Users/me/x.json"]),
        (r"at C:\Users\me", [r"C:\Users\me"]),
        ("see https://example.com/docs", []),
    ],
)
def test_paths_and_passwords_of_addresses_are_listed(note: str, private: list[str]) -> None:
    assert disclose(json.dumps({"notes": [note]})).private == private
