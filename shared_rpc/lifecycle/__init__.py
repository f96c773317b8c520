"""Process lifecycle: signals, the thread that runs finalisers, the end of the main code, forks."""
