"""Shared by our commands: help layout, missing dependencies, exit status."""

from __future__ import annotations

import argparse
import importlib
import signal
from types import ModuleType

from mooncake_hal.errors import DevelopmentToolsMissing


class DefaultsInHelp(argparse.HelpFormatter):
    """Ends an option's help with its default, unless the text says it in words or there is none.

    A metavar is the unit: ``--timeout SECONDS ... (default: 25)``.
    """

    def _get_help_string(self, action: argparse.Action) -> str:
        text, default = action.help or "", action.default
        has_none = default in (None, argparse.SUPPRESS, "", [], ()) or isinstance(default, bool)
        if has_none or "(default: " in text:
            return text
        if isinstance(default, float):
            shown = f"{default:g}"
        elif isinstance(default, (list, tuple)):
            shown = ",".join(map(str, default))
        else:
            shown = str(default)
        return f"{text} (default: {shown.replace('%', '%%')})"


def load_development_module(name: str) -> ModuleType:
    """Import a module that is not in the wheels that serve, but in mooncake-hal-testing.

    Raises:
        DevelopmentToolsMissing: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as exc:
        if exc.name is None or not f"{name}.".startswith(f"{exc.name}."):
            raise
        raise DevelopmentToolsMissing(
            f"{name} is not installed: it is a tool for development, which the packages that serve "
            "come without; install it by `pip install 'mooncake-hal[testing]'`"
        ) from exc


def describe_exit(status: int) -> str:
    """What a return code of ``subprocess`` means; a negative one is a signal's number."""
    if status >= 0:
        return f"exited with status {status}"
    if -status == signal.SIGKILL:
        return "killed by SIGKILL, as the kernel does when memory runs out: see dmesg"
    try:
        name = signal.Signals(-status).name
    except ValueError:  # a real-time signal has no name
        name = f"signal {-status}"
    return f"killed by {name}"
