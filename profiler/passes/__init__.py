"""One pass through the layers, forward and backward: what is timed and counted in it, and in which modes."""
