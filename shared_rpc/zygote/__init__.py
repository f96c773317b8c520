"""Processes forked from a process with many imports, a *zygote*: workers of a broker, scripts of ``shared-rpc run``.

``python -m shared_rpc.zygote`` imports modules (:mod:`~shared_rpc.zygote.imports`), checks that it can be forked
(:mod:`~shared_rpc.zygote.safety`), and forks for each client (:mod:`~shared_rpc.zygote.serving`). The fork reads the request,
forks the requested process, and remains as its watcher (:mod:`~shared_rpc.zygote.process`): neither needs the zygote any more.
All state that a fork must not share with its zygote is reset in one place (:mod:`~shared_rpc.zygote.child`).

A broker has its own zygote at the other end of a socket pair. A zygote of scripts listens for the commands of its user.
"""
