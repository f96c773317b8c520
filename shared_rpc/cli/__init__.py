"""The command line. Commands that only talk to a server load no torch."""
