"""Optional parts, made of the rest of the package: nothing else in it needs them."""
