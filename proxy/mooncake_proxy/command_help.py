"""How `--help` looks."""

from __future__ import annotations

import argparse


class DefaultsInHelp(argparse.HelpFormatter):
    """Ends an option's help with its default, unless the text tells it in words or there is none.

    Units are told by metavars: `--timeout SECONDS ... (default: 25)`.
    """

    def _get_help_string(self, action: argparse.Action) -> str:
        text = action.help or ""
        if not _has_default(action) or "(default: " in text:
            return text
        return f"{text} (default: {_shown(action.default).replace('%', '%%')})"


def _has_default(action: argparse.Action) -> bool:
    default = action.default
    if default is argparse.SUPPRESS or default is None or isinstance(default, bool):
        return False
    return default not in ("", [], ())


def _shown(default: object) -> str:
    if isinstance(default, float):
        return f"{default:g}"
    if isinstance(default, (list, tuple)):
        return ",".join(map(str, default))
    return str(default)
