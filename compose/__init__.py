"""How it is put together: the command line, the embedded stack and its supervisor. Sees every other package."""

__all__: list[str] = []
