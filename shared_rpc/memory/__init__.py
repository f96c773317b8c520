"""Memory: segments on the host and on GPUs, and the mappings of this process. Imports no torch by itself."""
