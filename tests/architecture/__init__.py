"""Rules that hold for the whole tree."""
