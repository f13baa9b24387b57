"""The end of sessions, which the emulated broker of the tests does not see to.

A Kafka broker removes a member from its group when its session has ended. The one that the tests
start keeps a killed member for ever (seen with 0.2.3: "Stable" with it, two sessions later). So
here the test plays that part of the broker, and only there: a member is removed through the admin
interface once its process has been dead, or stopped, for as long as a session lasts. A process that
has joined twice for so long has left once without being heard: both go, and it joins anew. And so
do all members of a group that has waited for one of them for so long.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

from kafka import KafkaAdminClient
from kafka.admin import MemberToRemove
from kafka.errors import KafkaError

from tests.integration.killing import is_running

LOOK_SECONDS = 0.5
STABLE = "Stable"


@contextmanager
def sessions_that_end(
    servers: str, groups: Sequence[str], session_seconds: float, *, are_processes: bool = True
) -> Iterator[None]:
    """Remove members that have been silent for a session, until the block ends.

    Args:
        servers: The broker.
        groups: Whose members are watched.
        session_seconds: How long a session lasts.
        are_processes: Whether every member is a process; members that are threads of the test
            cannot die unseen, and only a group that waits for one of them is shared out anew.
    """
    stop = threading.Event()
    arguments = (servers, groups, session_seconds, stop, are_processes)
    watching = threading.Thread(target=_watch, args=arguments)
    watching.start()
    try:
        yield
    finally:
        stop.set()
        watching.join()


def _watch(
    servers: str,
    groups: Sequence[str],
    session_seconds: float,
    stop: threading.Event,
    are_processes: bool,
) -> None:
    admin = KafkaAdminClient(bootstrap_servers=[servers], request_timeout_ms=2000)
    member_to_silent_since: dict[str, float] = {}
    while not stop.wait(LOOK_SECONDS):
        for group in groups:
            with suppress(KafkaError, KeyError):
                _end_sessions(admin, group, session_seconds, member_to_silent_since, are_processes)
    admin.close()


def _end_sessions(
    admin: KafkaAdminClient,
    group: str,
    session_seconds: float,
    member_to_silent_since: dict[str, float],
    are_processes: bool,
) -> None:
    now = time.monotonic()
    described = admin.describe_groups([group])[group]
    members = described["members"]
    client_to_count = Counter(member["client_id"] for member in members)
    is_waiting = described["group_state"] != STABLE
    for member in members:
        member_id, client = member["member_id"], member["client_id"]
        is_well = not are_processes or (
            client_to_count[client] == 1 and is_running(int(client.rpartition("-")[2]))
        )
        if is_well and not is_waiting:
            member_to_silent_since.pop(member_id, None)
        elif now - member_to_silent_since.setdefault(member_id, now) > session_seconds:
            admin.remove_group_members(group, [MemberToRemove(member_id=member_id)])
