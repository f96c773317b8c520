"""Other people's libraries over shared_rpc: what their users do with a model, done with one that is attached.

``libraries/`` names the objects, ``app.py`` serves them, ``visitor.py`` attaches them in another process and does everything
that ``checks.py`` lists, with it and with an object of its own. ``test_libraries.py`` starts them all. Run: ``nox -s compat``.
"""
