"""A second opinion on plan files: the file format's reference reader, which shares no code with the planner.

Everything is worked out again from the two JSON files, by the formulas that docs/verify.md states: no module
here imports planner, profiler, runtimes, or the cost models beyond their errors.
"""
