"""The report of a plan: one HTML page that needs nothing else."""
