"""``shared-rpc run``: scripts that begin as forks of a process which has imported torch already.

The *command* (:mod:`~shared_rpc.scripts.command`) is what the shell started; it stands for the script towards shell and
terminal (:mod:`~shared_rpc.scripts.front`). It finds the user's *zygote* of its :mod:`~shared_rpc.scripts.key`, or starts it
(:mod:`~shared_rpc.scripts.starting`); see :mod:`shared_rpc.zygote` for what that does.

What the command imports is kept small: it is a part of the time that a person waits.
"""
