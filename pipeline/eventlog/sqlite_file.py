"""The SQLite file under the embedded event log: opening, refusing, sharing connections.

Every failure leaves here as one ``EventLogError`` line that names the file and the cure.
"""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.eventlog.ports import EventLogError

APPLICATION_ID = 0x44524C50
"""Marks the file as ours ("DRLP"), so that somebody else's database is refused."""

LAYOUT_VERSION = 1

LAYOUT = """
CREATE TABLE topics (
    topic_id INTEGER PRIMARY KEY,
    name TEXT NOT NULL UNIQUE,
    num_partitions INTEGER NOT NULL,
    is_compacted INTEGER NOT NULL
) STRICT;
CREATE TABLE ends (
    topic_id INTEGER NOT NULL,
    partition INTEGER NOT NULL,
    end_offset INTEGER NOT NULL,
    PRIMARY KEY (topic_id, partition)
) STRICT, WITHOUT ROWID;
CREATE TABLE messages (
    topic_id INTEGER NOT NULL,
    partition INTEGER NOT NULL,
    message_offset INTEGER NOT NULL,
    appended_microseconds INTEGER NOT NULL,
    message_key BLOB,
    message_value BLOB,
    headers TEXT NOT NULL,
    compaction_key BLOB
) STRICT;
CREATE UNIQUE INDEX by_offset ON messages (topic_id, partition, message_offset);
CREATE INDEX by_key ON messages (topic_id, partition, compaction_key, message_offset)
    WHERE compaction_key IS NOT NULL;
CREATE INDEX tombstones ON messages (topic_id, appended_microseconds)
    WHERE compaction_key IS NOT NULL AND message_value IS NULL;
CREATE TABLE positions (
    consumer_group TEXT NOT NULL,
    topic_id INTEGER NOT NULL,
    partition INTEGER NOT NULL,
    message_offset INTEGER NOT NULL,
    PRIMARY KEY (consumer_group, topic_id, partition)
) STRICT, WITHOUT ROWID;
"""

_RETRY_SECONDS = 0.01


class SqliteFile:
    """A file of the event log and the connections that are open to it.

    Several processes may hold one each. Within a process every running call has a connection of
    its own; idle ones are kept for the next call.
    """

    def __init__(self, path: Path, *, busy_seconds: float) -> None:
        self._path = path
        self._busy_seconds = busy_seconds
        self._process_id = os.getpid()
        self._idle: list[sqlite3.Connection] = []
        self._lock = threading.Lock()
        self._is_closed = False
        with self.connection() as connection:
            is_new = _number(connection, "user_version") != LAYOUT_VERSION
        if is_new:
            self._create_layout()

    @contextmanager
    def connection(self) -> Iterator[sqlite3.Connection]:
        """Lend a connection in autocommit mode.

        Raises:
            EventLogError: If the file cannot serve, or the log is closed.
        """
        try:
            connection = self._take()
            try:
                yield connection
            finally:
                self._give_back(connection)
        except (sqlite3.Error, OSError) as error:
            raise EventLogError(f"{self._path}: {_cause_and_cure(error)}") from error

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Lend a connection inside a write transaction; durable once the block has ended.

        Raises:
            EventLogError: If it could not be stored; then nothing of it is.
        """
        with self.connection() as connection:
            connection.execute("BEGIN IMMEDIATE")
            try:
                yield connection
                connection.execute("COMMIT")
            except BaseException:
                # SQLite has rolled back by itself after some errors (a full disk).
                if connection.in_transaction:
                    connection.execute("ROLLBACK")
                raise

    def close(self) -> None:
        """Close every connection, those in use as soon as they come back."""
        with self._lock:
            self._is_closed = True
            idle, self._idle = self._idle, []
        if os.getpid() != self._process_id:
            return
        for connection in idle:
            connection.close()

    def _take(self) -> sqlite3.Connection:
        if os.getpid() != self._process_id:
            raise EventLogError(
                f"{self._path}: opened in process {self._process_id}, used in {os.getpid()}; "
                "open the event log after the fork"
            )
        with self._lock:
            if self._is_closed:
                raise EventLogError(f"{self._path}: the event log is closed; open it again")
            if self._idle:
                return self._idle.pop()
        return self._connect()

    def _give_back(self, connection: sqlite3.Connection) -> None:
        with self._lock:
            if not self._is_closed:
                self._idle.append(connection)
                return
        connection.close()

    def _connect(self) -> sqlite3.Connection:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        connection = sqlite3.connect(
            self._path, timeout=self._busy_seconds, isolation_level=None, check_same_thread=False
        )
        try:
            self._refuse_foreign(connection)
            self._use_write_ahead_log(connection)
            connection.execute("PRAGMA synchronous = FULL")
        except BaseException:
            connection.close()
            raise
        return connection

    def _use_write_ahead_log(self, connection: sqlite3.Connection) -> None:
        # The switch of the journal mode does not wait for the busy timeout by itself.
        deadline = time.monotonic() + self._busy_seconds
        while True:
            try:
                connection.execute("PRAGMA journal_mode = WAL")
                return
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY:
                    raise
                if time.monotonic() > deadline:
                    raise
                time.sleep(_RETRY_SECONDS)

    def _refuse_foreign(self, connection: sqlite3.Connection) -> None:
        """Refuse what is not ours to write to, before anything is written."""
        # In one transaction, since another process may be creating the layout just now.
        connection.execute("BEGIN")
        application_id = _number(connection, "application_id")
        version = _number(connection, "user_version")
        (num_tables,) = connection.execute("SELECT count(*) FROM sqlite_schema").fetchone()
        connection.execute("COMMIT")
        if application_id != APPLICATION_ID:
            if num_tables:
                raise EventLogError(
                    f"{self._path}: is another program's database; "
                    "move it away or use another folder"
                )
        elif version > LAYOUT_VERSION:
            raise EventLogError(
                f"{self._path}: has layout version {version}, this Draftloop reads "
                f"{LAYOUT_VERSION}; upgrade Draftloop or use another folder"
            )

    def _create_layout(self) -> None:
        with self.transaction() as connection:
            # Another process may have been first.
            if _number(connection, "user_version") == LAYOUT_VERSION:
                return
            for statement in LAYOUT.split(";\n"):
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {LAYOUT_VERSION}")


def _number(connection: sqlite3.Connection, pragma: str) -> int:
    return int(connection.execute(f"PRAGMA {pragma}").fetchone()[0])


def _cause_and_cure(error: sqlite3.Error | OSError) -> str:
    code = getattr(error, "sqlite_errorcode", None)
    if isinstance(error, OSError) or code is None:
        return f"{error}; use a folder that can be written"
    cures = {
        sqlite3.SQLITE_CANTOPEN: "use a folder that exists and can be written",
        sqlite3.SQLITE_READONLY: "make the file and its folder writable",
        sqlite3.SQLITE_PERM: "make the file and its folder writable",
        sqlite3.SQLITE_NOTADB: "the file is no event log; move it away or restore a copy",
        sqlite3.SQLITE_CORRUPT: "the file is damaged; move it away or restore a copy",
        sqlite3.SQLITE_FULL: "free space on the disk, then repeat; nothing was stored",
        sqlite3.SQLITE_BUSY: "another process writes for too long; end it, then repeat",
    }
    return f"{error}; {cures.get(code & 0xFF, 'look at the disk, then repeat')}"
