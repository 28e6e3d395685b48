"""Speculative decoding: draft tokens, so that one step of the model may yield several."""
