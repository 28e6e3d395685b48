"""What clients talk to: routes, OpenAI bodies, admission, errors."""
