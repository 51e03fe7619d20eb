"""Searches: takes costs, returns plans. Knows no torch."""
