"""Promises that no package's own tests hold: each file names the rows of the feature table that it proves."""
