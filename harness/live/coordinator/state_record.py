"""The owner of the record from which the next coordinator continues: the whole state, then the changes since."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from harness.live.coordinator.ledger.journal import Journal
from harness.live.coordinator.ledger.ledger import Ledger

__all__ = ["Journaled", "StateRecord"]

_RECORDS = 2000  # in the journal before it is replaced by one record, so that replaying it stays short


class Journaled(Protocol):
    """An owner with state that a successor needs."""

    @property
    def journaled(self) -> tuple[str, ...]:
        """The names of the attributes that have it."""
        ...


class StateRecord:
    """Writes the state of all owners to the journal, and reads it back."""

    def __init__(self, ledger: Ledger, owners: Mapping[str, Journaled]) -> None:
        """`owners`, by name; the ledger is one of them."""
        self._ledger, self._owners = ledger, owners

    def write(self) -> None:
        """Replace the journal by the present state."""
        state = {name: {kept: getattr(owner, kept) for kept in owner.journaled} for name, owner in self._owners.items()}
        self._ledger.restart_journal(pickle.dumps(("state", state)))

    def write_if_long(self) -> None:
        """Replace the journal by the present state, if it has many records."""
        if self._ledger.records > _RECORDS:
            self.write()

    def replay(self, journal: Journal, changes: Mapping[str, Callable[..., Any]]) -> None:
        """Bring the owners to where the journal ends. `changes`: what to call for each kind of record but the state."""
        self._ledger.replaying = True
        for record in journal:
            # The journal gives only records that a coordinator of this job has written.
            kind, *fields = pickle.loads(record)  # noqa: S301
            if kind == "state":
                self._load(*fields)
            else:
                changes[kind](*fields)
        self._ledger.replaying = False

    def _load(self, state: dict[str, dict[str, Any]]) -> None:
        for name, values in state.items():
            for kept, value in values.items():
                setattr(self._owners[name], kept, value)
