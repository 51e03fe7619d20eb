"""One case of a check in this process, whatever runtime runs it: built, measured alone, predicted, run."""

from __future__ import annotations
