"""A process of torch.distributed.pipelining: its stages, their schedule, its replicas. Imports torch."""
