"""The control connection of transports whose bytes move elsewhere: peers and regions."""
