"""A small Llama that is served by tunix's own server, in threads of this process."""

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import jax
import pytest

from tests.tiny_runs import model_folder
from tunix.inference.model import InferenceModel, InferenceOptions
from tunix.serving.app import server_of
from tunix.serving.gate import Gate
from tunix.serving.service import Service

LENGTH = 64


@contextmanager
def listening(service: Service, gate: Gate | None = None) -> Iterator[str]:
    """The address of a service, while it is served."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        server = server_of(service, gate)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]}, daemon=True)
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return model_folder(tmp_path / "llama")


@pytest.fixture(scope="package")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Service, str]]:
    """A service for tests that leave its weights as they are."""
    folder = model_folder(tmp_path_factory.mktemp("model") / "llama", max_position_embeddings=512)
    service = Service(InferenceModel(InferenceOptions(str(folder), slots=4)), devices=jax.devices()[:1])
    with listening(service) as url:
        yield service, url
    service.batches.close()


@pytest.fixture
def serve(model: Path, tmp_path: Path) -> Iterator[Callable[..., tuple[Service, str]]]:
    """Starts services of the model."""
    with ExitStack() as stack:

        def started(
            adapters: bool = False, slots: int = 8, length: int = LENGTH, gate: Gate | None = None, **settings: Any
        ) -> tuple[Service, str]:
            inference = InferenceModel(InferenceOptions(str(model), slots=slots, length=length))
            settings = {"updates": tmp_path, **settings}
            service = Service(inference, adapters=adapters, devices=jax.devices()[:1], **settings)
            stack.callback(service.batches.close)
            return service, stack.enter_context(listening(service, gate))

        yield started
