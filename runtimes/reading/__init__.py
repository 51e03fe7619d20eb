"""Partitions that other tools hold, read back: lists of layers, layouts, module names. Imports no torch."""
