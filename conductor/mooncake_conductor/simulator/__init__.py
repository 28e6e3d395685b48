"""The simulator: replays traces on modelled engines and links, with the real conductor."""
