"""What each training runtime is given of a plan, in its own format. Needs no torch."""
