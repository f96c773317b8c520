"""``python -m shared_rpc.zygote.attached PARENT PROGRAM [ARGUMENTS]``: a program that ends with the process that started it.

The kernel ends it, however that process ends: what was set here stays set while another program takes this process over.
"""

from __future__ import annotations

import os
import sys

from shared_rpc.zygote.process import die_with_parent

if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    try:
        os.execvp(sys.argv[2], sys.argv[2:])
    except OSError as error:
        sys.exit(f"shared-rpc: cannot start {sys.argv[2]}: {error}")
