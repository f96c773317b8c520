"""Processes that begin as forks of a process with many imports, a *zygote*: workers of a broker, scripts of ``shared-rpc run``.

``python -m shared_rpc.zygote`` imports modules (:mod:`~shared_rpc.zygote.preloading`), makes sure that it can be forked
(:mod:`~shared_rpc.zygote.safety`), and forks whenever it is asked to (:mod:`~shared_rpc.zygote.serving`). What a fork must not
have in common with its zygote is undone in one place (:mod:`~shared_rpc.zygote.child`).

A broker has a zygote of its own at the other end of a socket pair, and is the parent of its forks. A zygote of scripts listens
for the commands of its user; each script has a watcher as its parent (:mod:`~shared_rpc.zygote.forking`), and neither needs the
zygote any more.
"""
