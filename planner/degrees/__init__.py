"""Plans by degrees of parallelism: how many devices share a layer, the sequence, the experts, the batch."""
