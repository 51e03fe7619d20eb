"""Orders of actions that no paper has: the fastest for given stages, devices, costs and memory."""
