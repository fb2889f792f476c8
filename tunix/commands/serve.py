"""`tunix serve`: answers completions over HTTP, for runs that sample elsewhere than they train, and other clients."""

import socket
import sys

from tunix.errors import UserError, install_command
from tunix.hf.source import require_lm_head
from tunix.inference.model import InferenceModel, InferenceOptions


def serve(options: InferenceOptions, *, host: str, port: int, adapters: bool) -> None:
    """Answers until Ctrl-C.

    Args:
        options: the model.
        host: the address to listen on; others than this machine reach it where it is not loopback.
        port: the port.
        adapters: whether adapters may be loaded beside the weights, which takes their memory twice.

    Raises:
        UserError: the model is not accessible or cannot sample, the address cannot be listened on, or the server's
            packages are not installed.
    """
    try:
        from tunix.serving.app import server_of
    except ModuleNotFoundError as error:
        raise UserError(f"tunix serve needs {error.name}: {install_command('serve')}") from None
    from tunix.serving.service import Service

    inference = InferenceModel(options)
    require_lm_head(inference.source, options.model)
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        raise UserError(f"--host {host} --port {port}: {error.strerror or error}: choose another") from None
    with listener:
        print(f"{options.model}: reading, and compiling for {inference.slots} requests at a time", file=sys.stderr)
        service = Service(inference, adapters=adapters)
        service.warm()
        where = f"http://{host}:{port}"
        print(f"{where} answers, up to {service.length} tokens; Ctrl-C ends", file=sys.stderr, flush=True)
        server_of(service).run(sockets=[listener])
