"""Mutated files and command lines, run through pplan in this process: see fuzz.py beside this folder."""
