"""Errors that say by themselves what is wrong, and the one that refuses a broken contract."""

from __future__ import annotations


class KnownError(Exception):
    """Meant for the user: one line that names the thing and the cure."""


class ContractError(KnownError, ValueError):
    """A message breaks its contract.

    Attributes:
        path: Where, as dotted names and indices, for example ``rounds.num_accepted_tokens[3]``.
        found: The value that was found, as text.
        expected: What the contract asks for, as text.
    """

    def __init__(self, path: str, *, found: object, expected: object) -> None:
        self.path = path
        self.found = str(found)
        self.expected = str(expected)
        super().__init__(f"{path}: found {self.found}, expected {self.expected}")

    def under(self, parent: str) -> ContractError:
        """Return the same refusal seen from ``parent``: its path becomes ``parent.path``."""
        return ContractError(f"{parent}.{self.path}", found=self.found, expected=self.expected)

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the three parts when the error crosses a process."""
        return _rebuilt, (self.path, self.found, self.expected)


def _rebuilt(path: str, found: str, expected: str) -> ContractError:
    return ContractError(path, found=found, expected=expected)
