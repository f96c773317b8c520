"""Processes that begin as forks of a process with many imports, a *zygote*.

``python -m shared_rpc.zygote`` imports modules (:mod:`~shared_rpc.zygote.preloading`), makes sure that it can be forked
(:mod:`~shared_rpc.zygote.safety`), and forks whenever it is asked to (:mod:`~shared_rpc.zygote.serving`). What a fork must not
have in common with its zygote is undone in one place (:mod:`~shared_rpc.zygote.child`).
"""
