"""OpenAI-compatible server in front of pools of prefill and decode instances.

Importing the package has no side effects.
"""

__version__ = "0.1.0"
