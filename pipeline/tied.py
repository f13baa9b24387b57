"""A command that ends with whoever started it: what ``draftloop up`` runs its services as.

If ``up`` is killed, nobody is left to end its services, and they would hold their locks against the
ones that the next ``up`` starts.
"""

from __future__ import annotations

import os
import signal
import threading
import time

LOOK_SECONDS = 0.5


def tie_to_parent() -> None:
    """Send this process SIGTERM once its parent is gone."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(LOOK_SECONDS)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="parent-watch", daemon=True).start()


if __name__ == "__main__":
    from pipeline.cli import main

    tie_to_parent()
    main()
