"""One file per training runtime: writes the file that it reads."""
