"""The command line, and scripts that it runs."""
