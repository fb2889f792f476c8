"""Servers on this machine, for the slow tests and `benchmarks.remote`: `tunix serve`, and a real vLLM where TUNIX_VLLM
names the Python of its environment. docs/guide/servers.md says how to install one that runs on a CPU.
"""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

VARIABLE = "TUNIX_VLLM"
PYTHON = os.environ.get(VARIABLE)
WHY = f"set {VARIABLE} to the Python of an environment with vLLM"
LACKING = Path(__file__).with_name("vllm_on_cpu")
"""On the path of a vLLM, for what it lacks on a CPU."""
UP = 300.0
"""Seconds in which a server has to be up."""


@contextmanager
def real(
    folder: Path, log: Path, *words: str, length: int = 128, dtype: str = "float32", experts: bool = False
) -> Iterator[str]:
    """The address of a vLLM that serves a folder, while it does.

    Args:
        folder: of a model.
        log: receives what it writes.
        words: further arguments.
        length: tokens of a prompt and its completion at most.
        dtype: of its computation.
        experts: whether it returns the experts of a mixture's tokens; slow on a CPU (`benchmarks/vllm_on_cpu`).
    """
    assert PYTHON is not None, WHY
    command = [PYTHON, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--dtype", dtype]
    command += ["--max-model-len", str(length), "--enforce-eager", "--host", "127.0.0.1"]
    # A prompt is computed in one piece: with seeds, 0.32 on a CPU ends where one is divided.
    command += ["--max-num-batched-tokens", str(max(4096, length)), "--logprobs-mode", "processed_logprobs", *words]
    own = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    own |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "PYTHONPATH": str(LACKING)}
    if experts:
        command += ["--enable-return-routed-experts"]
        own |= {"VLLM_USE_V2_MODEL_RUNNER": "1", "TRITON_INTERPRET": "1"}
    rest = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "XLA_FLAGS")}
    with _process(command, {**rest, **own}, log) as address:
        yield address


@contextmanager
def ours(folder: Path | None, log: Path, *words: str, length: int = 128, dtype: str = "float32") -> Iterator[str]:
    """The address of a `tunix serve` of a folder, while it answers, or of the tiny model; arguments as in `real`.
    Weights may be loaded from the log's folder."""
    model = "--tiny" if folder is None else str(folder)
    command = [sys.executable, "-m", "tunix.cli", "serve", model, "--dtype", dtype]
    command += ["--max-length", str(length), "--allow-updates", str(log.parent), *words]
    with _process(command, {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}, log) as address:
        yield address


@contextmanager
def _process(command: Sequence[str], env: Mapping[str, str], log: Path) -> Iterator[str]:
    """The address of a server that a command starts."""
    port = free_port()
    command = [*command, "--port", str(port)]
    with log.open("w") as out:
        process = subprocess.Popen(
            command, env=env, stdout=out, stderr=subprocess.STDOUT, cwd=log.parent, start_new_session=True
        )
        try:
            address = f"http://127.0.0.1:{port}"
            _wait(process, address, log)
            yield address
        finally:
            # One that has ended by itself has written why, which is what the reader should see.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def free_port() -> int:
    """A port of loopback that nothing listens at."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _wait(process: subprocess.Popen, address: str, log: Path) -> None:
    """Waits until a server is up."""
    until = time.monotonic() + UP
    while time.monotonic() < until:
        if process.poll() is not None:
            break
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise AssertionError(f"the server is not up:\n{log.read_text(errors='replace')[-3000:]}")
