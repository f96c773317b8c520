"""``python -m shared_rpc.cli``."""

from shared_rpc.cli import main

main()
