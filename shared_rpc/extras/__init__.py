"""What is made of the rest of the package, and that nothing else in it needs."""
