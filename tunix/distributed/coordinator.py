"""The coordinator of a run's processes: JAX's service, in a process of its own, which process 0 starts.

Within process 0 it would die with it, and JAX ends every process that has lost its coordinator without a word. So it
stays for a while, and the others find out who is gone.

    python -m tunix.distributed.coordinator ADDRESS PROCESSES HEARTBEAT GRACE
"""

import signal
import sys
import time

from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]


def serve(address: str, processes: int, heartbeat: int, grace: float) -> None:
    """Serves until the parent has ended, and then some seconds more.

    Args:
        address: to listen at, e.g. `127.0.0.1:8476`.
        processes: how many take part.
        heartbeat: seconds without a sign of life after which JAX itself ends all processes.
        grace: seconds that it stays if the parent ended without saying so.
    """
    # A scheduler signals all processes of a job; this one has to be there while the others save and meet.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    service = _jax.get_distributed_runtime_service(address, processes, heartbeat_timeout=heartbeat)
    print("ready", flush=True)
    if not sys.stdin.read():  # the parent writes when all is over; where it dies the pipe ends
        time.sleep(grace)
    service.shutdown()


if __name__ == "__main__":
    serve(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
