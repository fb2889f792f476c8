"""Hands weights to servers: as a folder that they load, since JAX has no part in vLLM's own transfer (NCCL, CUDA IPC).

All weights: a Hugging Face folder is written once, then each server pauses, loads it in place, empties its prefix
cache, notes the version, and resumes. An adapter alone: a PEFT folder, loaded under a name of its own beside the one
before, which is unloaded afterwards. Folders are deleted when no server reads them any more.
"""

import asyncio
import contextlib
import secrets
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tunix.distributed import processes
from tunix.lora.config import AdapterConfig
from tunix.rollout.servers.protocol import Failed, Refused, Unfit
from tunix.rollout.servers.server import Server

Write = Callable[[Path, Mapping[str, Any], bool], Any]
"""(new folder, all weights by name, whether the adapter alone is written) -> anything; writes the folder."""
NAME = "tunix-"
"""How the names of weights and adapters begin."""
RESETS = 5
"""Attempts to empty a prefix cache, which fail while a request still holds a part of it."""


def moves_alone(adapter: AdapterConfig | None) -> bool:
    """Whether servers load the adapter beside their base. Others are merged, and all weights move: DoRA and tables that
    train are unknown to servers, and a rounded base (QLoRA) is not the one that they hold."""
    return adapter is not None and adapter.kind == "lora" and not adapter.dora and not adapter.also


class Handover:
    """Writes weights, and has servers load them."""

    def __init__(self, folder: Path, write: Write, adapter: bool):
        """Writes nothing yet.

        Args:
            folder: holds the weights; servers see it under the same path. The lead's is used.
            write: writes a folder.
            adapter: whether an adapter is handed over alone.
        """
        self._folder, self._write, self.adapter = folder.expanduser().resolve(), write, adapter
        self._run = secrets.token_hex(4)
        self._before: list[Path] = []

    def written(self, params: Mapping[str, Any], version: int) -> Path:
        """Writes these weights, in a folder of the lead; to be called by all processes.

        Returns:
            The folder, e.g. `runs/grpo/weights/tunix-1f03-3`. Its name is of no other weights: the adapter's, or the
            version that a server reports.

        Raises:
            UserError: the disk refuses.
        """

        def place() -> str:
            new = self._folder / f"{NAME}{self._run}-{version}"
            shutil.rmtree(new, ignore_errors=True)
            return str(new)

        folder = Path(processes.broadcast("weights", place))
        self._write(folder, params, self.adapter)
        if processes.lead():
            self._before.append(folder)
        return folder

    def forget(self) -> None:
        """Deletes all folders but the last, which servers that come back may still have to read; the lead has them."""
        while len(self._before) > 1:
            shutil.rmtree(self._before.pop(0), ignore_errors=True)

    async def load(self, server: Server, folder: Path, fresh: bool) -> None:
        """Has a server load the weights of a folder, and answer requests from them.

        Args:
            fresh: whether it may still have adapters of this folder that a run which was killed has left behind.

        Raises:
            Failed: it did not load them.
            Unfit: it was not started so that it can load any.
        """
        if self.adapter:
            for card in await cards(server) if fresh else ():
                if card["id"].startswith(NAME) and Path(str(card.get("root"))).parent == self._folder:
                    await _unload(server, card["id"])
            before = server.model
            try:
                await server.call("/v1/load_lora_adapter", {"lora_name": folder.name, "lora_path": str(folder)})
            except Refused as error:
                hint = (
                    f"start tunix serve with --enable-lora --allow-updates {self._folder}, vLLM with --enable-lora "
                    "--max-lora-rank RANK and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
                )
                raise Unfit(f"it loads no adapter ({error}): {hint}; it has to see {folder}") from None
            except Failed as error:
                raise Failed(f"it loads no adapter from {folder} ({error}): does it see that folder?") from None
            server.model = folder.name
            if before.startswith(NAME) and before != folder.name:
                await _unload(server, before)
            return
        try:
            await server.call("/pause?mode=wait", {})
        except Refused as error:
            raise Unfit(
                f"it loads no weights ({error}): start tunix serve with --allow-updates {self._folder}, vLLM 0.32 or "
                "newer with VLLM_SERVER_DEV_MODE=1"
            ) from None
        try:
            try:
                reload = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
                await server.call("/collective_rpc", reload)
            except (Failed, Refused) as error:
                raise Failed(
                    f"it could not load the weights in {folder} ({error}): it has to see that folder under this path, "
                    "and to have been started with a model of the same structure"
                ) from None
            for attempt in range(RESETS):
                if (await server.call("/reset_prefix_cache", {})).get("success"):
                    break
                await asyncio.sleep(0.2 * 2**attempt)
            else:
                raise Failed("its prefix cache still holds keys and values of earlier weights")
            await server.call("/update_weight_version", {"new_version": folder.name})
        finally:
            await server.call("/resume", {})
        if not await self.holds(server, folder):
            raise Failed(f"it does not report the version {folder.name} that it was told to load")

    async def holds(self, server: Server, folder: Path) -> bool:
        """Whether a server still has weights that it has loaded; it loses them where it is started anew.

        Raises:
            Failed: it does not answer.
        """
        if self.adapter:
            return any(card["id"] == folder.name for card in await cards(server))
        return (await server.call("/weight_info")).get("weight_version") == folder.name


async def cards(server: Server, path: str = "/v1/models") -> list[dict[str, Any]]:
    """The models and adapters that a server lists."""
    try:
        return list((await server.call(path))["data"])
    except (TypeError, KeyError):
        raise Failed(f"its {path} lists nothing: it is no server of this protocol") from None


async def _unload(server: Server, name: str) -> None:
    """Unloads an adapter that no request names any more; one that is not there is fine."""
    with contextlib.suppress(Failed, Refused):
        await server.call("/v1/unload_lora_adapter", {"lora_name": name})
