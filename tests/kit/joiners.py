"""Joiners without Ray: programs that are the source of records of the server which starts them."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

from shared_rpc import Client

#: A token for sources that a test starts itself.
TOKEN = "the token of the tests"

#: A joiner that builds all misses of its server, and records how it was started.
PROGRAM = """
import os, sys
from shared_rpc import Client

print("the joiner of", sys.argv[-1], os.environ["SHARED_TENSOR_ROLE"], flush=True)
with Client(socket_path=sys.argv[-1]) as client, client.source() as source:
    source.report({"cluster": "test", "node": "a", "nodes": 1})
    for miss in source:
        source.build(miss).release()
"""

#: The same, but it continues after the end of its server.
FAITHLESS = f"""
import time
try:
    {textwrap.indent(PROGRAM, "    ").strip()}
except Exception:
    pass
while True:
    time.sleep(60)
"""


def command_of(folder: Path, code: str) -> str:
    """The command line of such a program, in a file of that folder."""
    file = folder / "joiner.py"
    file.write_text(code)
    return f"{sys.executable} {file}"


def source_of(client: Client) -> dict[str, Any]:
    """Return the server's description of its source."""
    found = client.get_server_info()["source"]
    assert found is not None
    return dict(found)
