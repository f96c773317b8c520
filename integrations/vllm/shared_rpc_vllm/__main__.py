"""The command ``shared-rpc-vllm``, which loads weights before an engine needs them."""

from __future__ import annotations

import sys

_USAGE = """\
usage: shared-rpc-vllm {preload,refresh} MODEL [options of vllm serve]

preload   load the weights for an engine with these options, unless the server has them
refresh   load them again: engines that start afterwards attach to the new copy, running engines keep theirs
"""


def main(words: list[str] | None = None) -> int:
    """Run the command; return its exit code."""
    words = sys.argv[1:] if words is None else words
    if len(words) < 2 or words[0] not in ("preload", "refresh"):
        print(_USAGE, end="", file=sys.stderr)
        return 2
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    from shared_rpc_vllm.loader import SharedRpcLoader

    action, model, *options = words
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser(prog=f"shared-rpc-vllm {action} MODEL"))
    arguments = EngineArgs.from_cli_args(parser.parse_args(["--model", model, *options]))
    print(getattr(SharedRpcLoader(arguments.create_load_config()), action)(arguments.create_engine_config()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
