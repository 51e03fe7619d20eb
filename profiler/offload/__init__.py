"""A model that does not fit on its device whole: measured segment by segment, the rest on the host."""
