"""What the spread of the layers' seconds makes of a step: its interval, and the plan that bears it best."""
