"""`tunix serve`: answers completions over HTTP, for runs that sample elsewhere than they train, and other clients."""

import socket
import sys

from tunix.errors import UserError, install_command
from tunix.hf.source import require_lm_head
from tunix.inference.model import InferenceModel, InferenceOptions


def serve(options: InferenceOptions, listener: socket.socket, *, adapters: bool) -> None:
    """Answers until Ctrl-C.

    Args:
        options: the model.
        listener: the socket that listens, whose clients wait until the model is there; closed at the end.
        adapters: whether adapters may be loaded beside the weights, which takes their memory twice.

    Raises:
        UserError: the model is not accessible or cannot sample, or the server's packages are not installed.
    """
    with listener:
        try:
            from tunix.serving.app import server_of
        except ModuleNotFoundError as error:
            raise UserError(f"tunix serve needs {error.name}: {install_command('serve')}") from None
        from tunix.serving.service import Service

        inference = InferenceModel(options)
        require_lm_head(inference.source, options.model)
        print(f"{options.model}: reading, and compiling for {inference.slots} requests at a time", file=sys.stderr)
        service = Service(inference, adapters=adapters)
        service.warm()
        host, port, *_ = listener.getsockname()
        where = f"[{host}]" if ":" in host else host
        print(f"http://{where}:{port} answers, up to {service.length} tokens; Ctrl-C ends", file=sys.stderr, flush=True)
        server_of(service).run(sockets=[listener])
