"""What a live instance costs, measured through its API."""
