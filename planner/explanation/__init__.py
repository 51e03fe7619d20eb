"""Explanations of a plan: one module for each question that `pplan explain` and `pplan compare` answer."""
