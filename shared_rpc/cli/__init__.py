"""The command line. Commands that only talk to a server load no torch."""

from shared_rpc.cli.app import main

__all__ = ["main"]
