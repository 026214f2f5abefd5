"""Runtimes: one suite over all of them, then the tests of each."""
