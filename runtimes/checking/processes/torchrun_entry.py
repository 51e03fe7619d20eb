"""This process as one of a check, where a torchrun of the user's started all of them."""

from __future__ import annotations
