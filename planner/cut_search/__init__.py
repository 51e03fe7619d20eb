"""Where to cut the layers under any synchronous schedule: a search for its own costs, with a bound."""
