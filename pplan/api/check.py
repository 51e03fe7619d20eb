"""Checks a plan: prepares its cases, has processes run them, and puts predictions beside measurements."""

from __future__ import annotations
