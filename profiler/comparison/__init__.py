"""Whether the layers of a model compute what the model does: outputs, gradients, buffers, random numbers."""
