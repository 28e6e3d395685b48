"""How processes get at each other's GPU memory: what this device can do, and what is taken."""
