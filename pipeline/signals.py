"""How a command is told to end: SIGTERM and SIGINT set an event that its loop looks at."""

from __future__ import annotations

import os
import signal
import threading


def stop_on_signals() -> threading.Event:
    """Return an event that SIGTERM and SIGINT set; a second signal ends the process."""
    stop = threading.Event()

    def ask_to_stop(number: int, _: object) -> None:
        if stop.is_set():
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        stop.set()

    signal.signal(signal.SIGTERM, ask_to_stop)
    signal.signal(signal.SIGINT, ask_to_stop)
    return stop
