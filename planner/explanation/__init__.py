"""Why a plan is as it is: one file for each question that `pplan explain` and `pplan compare` answer."""
