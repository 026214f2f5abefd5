"""Runtimes: one suite over all of them, then what is particular to each."""
