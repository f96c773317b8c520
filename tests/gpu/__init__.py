"""Tests that need a GPU, several GPUs, or the whole memory of one."""
