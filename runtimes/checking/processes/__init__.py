"""The processes of a check. Imports torch."""
