"""Optional parts on top of the rest of the package, which does not need them."""
