"""``draftloop serve`` says what is wrong with its address and keys before it reads the model."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest
from rich.console import Console

from pipeline import serving
from pipeline.configuration.server_settings import ServerSettings
from pipeline.configuration.settings import ModelSettings, Settings, SettingsError
from pipeline.serving import bound_socket, run_server


def serve(folder: Path, server: ServerSettings) -> None:
    settings = Settings(data=folder, model=ModelSettings(path="nowhere"), server=server)
    run_server(settings, threading.Event(), Console())


def test_invalid_addresses_and_keys_are_refused_before_the_model_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(serving, "open_target", lambda *_, **__: pytest.fail("was read"))
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = int(taken.getsockname()[1])
        with pytest.raises(SettingsError, match=f"server.port = {port}: cannot .* name another"):
            serve(tmp_path, ServerSettings(port=port))
    with pytest.raises(SettingsError, match=r"host = '192\.0\.2\.1'.*cannot be listened on"):
        serve(tmp_path, ServerSettings(host="192.0.2.1"))
    with pytest.raises(SettingsError, match=r"admin_keys_file = .*cannot be read"):
        serve(tmp_path, ServerSettings(admin_keys_file=tmp_path / "none"))


def test_a_bound_socket_refuses_clients_until_it_is_listened_on() -> None:
    with bound_socket(ServerSettings(port=0)) as listener:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(listener.getsockname(), timeout=5.0)
        listener.listen()
        socket.create_connection(listener.getsockname(), timeout=5.0).close()
