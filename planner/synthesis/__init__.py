"""Synthesis of the fastest orders of actions for given stages, devices, costs and memory."""
