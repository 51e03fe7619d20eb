"""The processes of a check, and their launcher. Imports torch."""
