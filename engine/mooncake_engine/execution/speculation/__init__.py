"""Guessing tokens ahead, so that one step of the model may bring several."""
