"""The schema of the registry's database, one revision per file in versions/; run by registry/catalog/database.py."""

__all__: list[str] = []
