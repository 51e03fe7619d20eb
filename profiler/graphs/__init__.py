"""A model's computation as a graph of torch.fx or torch.export, and the places where it can be cut."""
