"""Other people's loaders: what attaches in place of loading, and what goes on as it was."""
