"""Sharing mechanisms: host memory as a memfd, a GPU's by one of three; and the choice between them."""
