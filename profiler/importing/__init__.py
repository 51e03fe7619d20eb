"""Profiles from elsewhere: another planner's graph, or a table of costs. Knows no torch."""
