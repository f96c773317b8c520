"""What needs a GPU, several of them, or all of one's memory to look at."""
