"""What the processes of a check write down of themselves, so that their parent can tell which one failed."""

from __future__ import annotations
