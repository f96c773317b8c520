"""Life of a process: signals, the thread that runs finalisers, the end of its main code, forks."""
