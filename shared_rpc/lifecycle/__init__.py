"""How a process lives: signals, the thread that runs finalisers, the end of its main code, forks."""
