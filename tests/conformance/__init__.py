"""One suite per seam, run over every implementation of it."""
