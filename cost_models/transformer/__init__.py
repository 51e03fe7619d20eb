"""What a transformer's layers cost on one rank of a tensor-, context- and expert-parallel training step."""
