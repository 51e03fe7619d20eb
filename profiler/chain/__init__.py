"""A model as a chain of layers, and the parameters that several layers share."""
