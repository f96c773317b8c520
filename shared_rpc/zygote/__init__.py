"""Processes that begin as forks of a process with many imports, a *zygote*: workers of a broker, scripts of ``shared-rpc run``.

``python -m shared_rpc.zygote`` imports modules (:mod:`~shared_rpc.zygote.imports`), makes sure that it can be forked
(:mod:`~shared_rpc.zygote.safety`), and forks for each client (:mod:`~shared_rpc.zygote.serving`). The fork reads the request,
and forks the requested process, whose watcher it stays (:mod:`~shared_rpc.zygote.process`): neither needs the zygote any more.
What a fork must not have in common with its zygote is undone in one place (:mod:`~shared_rpc.zygote.child`).

A broker has a zygote of its own at the other end of a socket pair. A zygote of scripts listens for the commands of its user.
"""
