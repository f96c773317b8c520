"""``shared-rpc run``: scripts that begin as forks of a process which has imported torch already.

Four processes take part. The *command* (:mod:`~shared_rpc.scripts.command`) is what the shell started; it stands for the
script towards shell and terminal (:mod:`~shared_rpc.scripts.front`). The *zygote* (:mod:`~shared_rpc.scripts.zygote`) is the
user's, one for each :mod:`~shared_rpc.scripts.key`. It forks a *watcher* for each script
(:mod:`~shared_rpc.scripts.watcher`), and that forks the *script* (:mod:`~shared_rpc.scripts.main_module`). Watcher and script
need the zygote no more; the script ends with its watcher, and the watcher ends the script when the command is gone.

What the command imports is kept small: it is a part of the time that a person waits.
"""
