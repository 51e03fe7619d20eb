"""The effect of the spread of the layers' seconds: the interval of a step, and the most robust plan."""
