"""How one request travels: the two flows with a hand-over, and the plain one."""
