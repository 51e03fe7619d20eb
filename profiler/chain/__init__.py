"""The layers of a model, in a chain, and what several of them hold."""
