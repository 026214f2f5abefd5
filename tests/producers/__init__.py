"""How work enters: clients against a real broker, mostly without a worker."""
