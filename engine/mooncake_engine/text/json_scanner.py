"""Finds the end of a JSON object in text that arrives in pieces."""

from __future__ import annotations

_CLOSING = {"{": "}", "[": "]"}


class ObjectScanner:
    """Follows brackets and strings, and nothing else: what is between them is not judged. White
    space may come first.

    No character is looked at twice.
    """

    def __init__(self) -> None:
        self._open: list[str] = []
        self._is_in_string = False
        self._is_escaped = False
        self.is_complete = False
        self.is_broken = False

    def feed(self, text: str) -> int:
        """Read on, up to the object's end or to a character that can't be part of it.

        Returns:
            How many characters belong to the object. ``is_complete`` and ``is_broken`` say why
            it is fewer than were given.
        """
        for position, character in enumerate(text):
            if self._is_in_string:
                self._read_in_string(character)
            elif not self._read(character):
                self.is_broken = True
                return position
            if self.is_complete:
                return position + 1
        return len(text)

    def _read_in_string(self, character: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif character == "\\":
            self._is_escaped = True
        elif character == '"':
            self._is_in_string = False

    def _read(self, character: str) -> bool:
        """Whether the character may stand there."""
        if not self._open and character != "{":
            return character.isspace()
        if character in _CLOSING:
            self._open.append(_CLOSING[character])
        elif character in "}]":
            if self._open.pop() != character:
                return False
            self.is_complete = not self._open
        elif character == '"':
            self._is_in_string = True
        return True
