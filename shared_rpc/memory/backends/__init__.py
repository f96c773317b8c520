"""How memory is shared: host memory as a memfd, that of a GPU by one of three mechanisms; and which one is chosen."""
