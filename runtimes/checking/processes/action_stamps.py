"""When each action of a process starts and ends."""

from __future__ import annotations
