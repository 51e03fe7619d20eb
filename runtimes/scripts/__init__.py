"""Training scripts for a plan: one template a runtime, and what of it the model decides."""
