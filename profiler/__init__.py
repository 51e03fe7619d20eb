"""Turns a model into a chain of layers and measures them."""
