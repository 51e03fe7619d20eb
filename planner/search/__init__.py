"""The search for the fastest plan, and the proof of how far it is from the best there is."""
