"""The `jcuts` command: one module per subcommand, listed in `main.py`."""
