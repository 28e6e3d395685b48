"""MooncakeConnector: the decode side pulls."""
