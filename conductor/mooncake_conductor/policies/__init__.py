"""Policies that choose the prefill instance, one file per family, all on the same `Situation`."""
