"""Which requests run in the next step: pure code, plain numbers."""
