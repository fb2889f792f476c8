"""The coordinator of a run's processes: JAX's service, in a process of its own, which process 0 starts.

Within process 0 it would die with it, and JAX ends every process that has lost its coordinator without a word. So it
stays for a while, and the others find out who is gone.

    python -m tunix.distributed.coordinator ADDRESS PROCESSES HEARTBEAT GRACE

It serves at ADDRESS, e.g. `127.0.0.1:8476`, until its parent has ended; GRACE seconds more where that did not say so.
After HEARTBEAT seconds without a sign of life JAX itself ends all processes.
"""

import signal
import sys
import time

from jax._src.lib import _jax  # pyright: ignore[reportPrivateImportUsage]

if __name__ == "__main__":
    # A scheduler signals all processes of a job; this one has to be there while the others save and meet.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    address, processes, heartbeat, grace = sys.argv[1:]
    service = _jax.get_distributed_runtime_service(address, int(processes), heartbeat_timeout=int(heartbeat))
    print("ready", flush=True)
    if not sys.stdin.read():  # the parent writes when all is over; where it dies the pipe ends
        time.sleep(float(grace))
    service.shutdown()
