"""The command line. Commands that only send requests to a server load no torch."""
