"""``shared-rpc run``: scripts forked from a process that has already imported torch.

The *command* (:mod:`~shared_rpc.scripts.command`) is the process started by the shell; it represents the script to the shell
and the terminal (:mod:`~shared_rpc.scripts.front`). It finds the user's *zygote* by its :mod:`~shared_rpc.scripts.key`, or
starts it (:mod:`~shared_rpc.scripts.starting`); see :mod:`shared_rpc.zygote` for the zygote itself.

The command has few imports: they delay the script.
"""
