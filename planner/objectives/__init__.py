"""What a plan is the best of: the time of a step, the throughput, the memory, the cost; and the frontier."""
