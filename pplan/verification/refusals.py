"""Why a line differs, or is not checked, where that is found far from the line."""

from __future__ import annotations


class NotLegal(Exception):
    """The plan says what cannot be."""


class NotChecked(Exception):
    """The files do not say enough, or too much to go through."""
