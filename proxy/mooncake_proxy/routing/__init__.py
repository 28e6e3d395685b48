"""Which instance takes the next step of a request, and when it is tried again."""
