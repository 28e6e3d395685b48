"""The path of one request: pull and push between P and D, and plain on one instance."""
