"""Which instance prefills and decodes a request, decided from costs in seconds; pure Python."""

__version__ = "0.1.0"
