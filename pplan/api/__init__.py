"""The application: what the command line and a script call, without a terminal and without typer."""
