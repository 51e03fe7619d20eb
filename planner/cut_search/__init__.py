"""Cut search for any synchronous schedule under its own costs, with a bound."""
