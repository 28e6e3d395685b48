"""The conductor: decides which instances prefill and decode a request, by costs in seconds.

Pure Python with numpy; the proxy and the simulator use the same code.
"""

__version__ = "0.1.0"
