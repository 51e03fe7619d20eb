"""The plain model's losses, against a loop by hand; samples that differ."""

from __future__ import annotations
