"""MooncakeLayerwiseConnector: the prefill side pushes, layer by layer."""
