"""The null and paced backends, which compute nothing: for tests of schedulers, servers and
connectors at full speed."""
