"""The stage of the fault run: a broker, services in processes, and the means to disturb them."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

from pipeline.elected_training import GROUP as TRAINER_GROUP
from pipeline.eventlog.kafka import KafkaEventLog
from pipeline.eventlog.ports import EventLogError, Message
from pipeline.messaging.boards import LogReleaseBoard
from pipeline.messaging.group_source import GROUP
from pipeline.releases.registry import DrafterRegistry
from schemas.events import DrafterReleased
from schemas.topics import VERIFICATION_EVENTS
from tests.integration.broker import free_port, own_broker
from tests.integration.killing import fork_server, is_running
from tests.integration.roles import NUM_PARTITIONS, OPTIONS, open_log
from tests.integration.sessions import sessions_that_end

MOST_SECONDS = 180.0
SAVED_SECONDS = 2.5
"""The emulated broker writes what it holds to its disk about once a second."""
AWAY_SECONDS = 0.7

ROLE_TO_COUNT = {"learner": 2, "trainer": 2, "archiver": 1, "worker": 2}
"""What runs at the beginning."""


class Stage:
    """Everything that the faults act on.

    Args:
        folder: Holds the broker's data, ``archive``, ``registry`` and what the services write.
        stack: Ends everything.
        has_small_disk: The folder ``archive`` is a small disk of its own, which may be filled.

    Attributes:
        log: The test's own view of the event log.
        sequence: Next sequence of the workers that the test plays itself.
    """

    def __init__(self, folder: Path, stack: ExitStack, *, has_small_disk: bool) -> None:
        self.folder = folder
        self.has_small_disk = has_small_disk
        self._port = free_port()
        self._broker = ExitStack()
        stack.callback(self._broker.close)
        servers = self._broker.enter_context(own_broker(folder, self._port))
        self.log: KafkaEventLog = open_log(servers)
        stack.callback(lambda: self.log.close())
        self._server = stack.enter_context(fork_server("tests.integration.roles", servers, folder))
        groups, seconds = (GROUP, TRAINER_GROUP), OPTIONS.session_timeout_seconds
        stack.enter_context(sessions_that_end(servers, groups, seconds))
        self._id_to_name: dict[int, str] = {}
        self._stopped: set[int] = set()
        self._num_started = 0
        self.registry = DrafterRegistry(str(folder / "registry"))
        self.sequence = 1
        stack.callback(self._kill_all)

    def start(self, role: str) -> None:
        """Start one more service."""
        self._num_started += 1
        line = f"{role} {self._num_started}"
        self._id_to_name[self._server.start(line)] = line.replace(" ", "-")

    def ids(self, role: str) -> list[int]:
        """Return the processes of a role that were started and not ended, oldest first."""
        return [one for one, name in self._id_to_name.items() if name.startswith(f"{role}-")]

    def end(self, process_id: int, number: int) -> None:
        """End a service with a signal; it counts no longer as running."""
        self.assert_running()
        self._stopped.add(process_id)
        del self._id_to_name[process_id]
        os.kill(process_id, number)

    def end_all(self, role: str) -> None:
        """End all services of a role well, and wait until they have."""
        ended = self.ids(role)
        for process_id in ended:
            self.end(process_id, signal.SIGTERM)
        until(lambda: not any(map(is_running, ended)), f"the end of every {role}")

    def assert_running(self) -> None:
        """Fail with what a service has written if it has ended by itself."""
        for process_id, name in self._id_to_name.items():
            if not is_running(process_id):
                output = (self.folder / f"{name}.err").read_text()[-4000:]
                raise AssertionError(f"{name} has ended by itself:\n{output}")

    def stand_still(self, role: str, seconds: float) -> None:
        """Stop the oldest service of a role in the midst of what it does, and let it go on."""
        process_id = self.ids(role)[0]
        os.kill(process_id, signal.SIGSTOP)
        time.sleep(seconds)
        os.kill(process_id, signal.SIGCONT)

    def restart_broker(self) -> None:
        """Take the broker away from everybody at an arbitrary moment, and bring it back.

        Stopped while it is written to, the emulated broker (0.2.3, SIGTERM) forgets messages that
        it has acknowledged and gives their offsets to others: the log itself changes, and there is
        nothing left that a clean pass could be compared with. So the services stand still, each
        wherever it is, until all that was acknowledged is on the broker's disk; they go on when the
        broker is gone.
        """
        self.assert_running()
        process_ids = list(self._id_to_name)
        for process_id in process_ids:
            os.kill(process_id, signal.SIGSTOP)
        try:
            time.sleep(SAVED_SECONDS)
            self._broker.close()
        finally:
            for process_id in process_ids:
                os.kill(process_id, signal.SIGCONT)
        time.sleep(AWAY_SECONDS)
        self._broker.enter_context(own_broker(self.folder, self._port))

    def append(self, messages: list[Message]) -> None:
        """Append events, however long the broker takes to come back."""
        until(lambda: self._is_appended(messages), "the broker")

    def _is_appended(self, messages: list[Message]) -> bool:
        try:
            self.log.append(VERIFICATION_EVENTS, messages)
        except EventLogError:
            return False
        return True

    def committed(self) -> dict[int, int | None]:
        """Return the learners' position in every partition."""
        with suppress(EventLogError):
            partitions = range(NUM_PARTITIONS)
            return {p: self.log.committed(GROUP, VERIFICATION_EVENTS, p) for p in partitions}
        return {}

    def latest_release(self) -> DrafterReleased | None:
        """Return what is announced; None if nothing is, or if nobody answers."""
        with suppress(EventLogError):
            releases = LogReleaseBoard(self.log, source="test").read_all()
            return releases[0] if releases else None
        return None

    def assert_released_version_is_there(self) -> None:
        """Fail if the newest announced version cannot be loaded."""
        release = self.latest_release()
        if release is not None:
            digest = release.manifest_sha256
            self.registry.read_training_state(release.artifact_uri, manifest_sha256=digest)

    def _kill_all(self) -> None:
        for process_id in self._id_to_name:
            with suppress(ProcessLookupError):
                os.kill(process_id, signal.SIGKILL)


def until(condition: Callable[[], bool], what: str, seconds: float = MOST_SECONDS) -> None:
    """Wait for a condition; ``what`` names it if it does not come."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s in vain for {what}"
        time.sleep(0.05)
