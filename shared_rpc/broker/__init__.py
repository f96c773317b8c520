"""A server with its endpoints in worker processes: it holds their results, and needs neither torch nor CUDA."""
