"""The user's model: its input, its loss, copies of it, and what may fail in its code."""
