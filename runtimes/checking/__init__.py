"""Runs plans for a few steps on the devices at hand, and holds the predictions against the clock."""
