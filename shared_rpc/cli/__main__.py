"""``python -m shared_rpc.cli``."""

from shared_rpc.cli.app import main

main()
