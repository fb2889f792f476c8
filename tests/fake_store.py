"""A bucket of Google's object store as a local folder, without a network: for fsspec, and for tensorstore over HTTP.

An object is one file named by its quoted key, so there are neither folders nor renames, as in a real store. A second
process sees the same bucket: `python -m tests.fake_store ROOT WORDS...` is `tunix WORDS...` with it in place of `gs://`.
"""

import io
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, quote, unquote, urlsplit

from etils.epath import backend
from fsspec.spec import AbstractFileSystem

HOLDS = "FAKE_STORE_HOLDS"


class Objects:
    """The objects of all buckets, by `bucket/key`."""

    def __init__(self, root: Path):
        self.root = root
        root.mkdir(exist_ok=True)

    def keys(self, prefix: str = "") -> list[str]:
        """All keys that begin with a prefix."""
        found = (unquote(name) for name in os.listdir(self.root) if not name.endswith(".put"))
        return sorted(key for key in found if key.startswith(prefix))

    def file(self, key: str) -> Path:
        """Where an object is."""
        return self.root / quote(key, safe="")

    def put(self, key: str, content: bytes) -> None:
        """Writes an object: all of it at once, as a store does."""
        part = self.root / f"{quote(key, safe='')}.put"
        part.write_bytes(content)
        part.replace(self.file(key))


class FakeStore(AbstractFileSystem):
    """What gcsfs would be, for fsspec."""

    protocol = ("gs", "gcs")
    cachable = False

    def __init__(self, root: Path):
        super().__init__()
        self.objects = Objects(root)
        self.refuses = ""
        """Writes of keys that contain this fail."""
        self.holds = os.environ.get(HOLDS)
        """A write of a key that ends like this never returns."""

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        """The objects and pseudo-folders directly below a path, or the object itself."""
        path = str(self._strip_protocol(path))
        keys = self.objects.keys(f"{path}/")
        if path in self.objects.keys(path):
            found = {path: "file"}
        elif not keys:
            raise FileNotFoundError(path)
        else:
            parts = [key.removeprefix(f"{path}/").partition("/") for key in keys]
            found = {f"{path}/{first}": "directory" if slash else "file" for first, slash, _ in parts}
        if not detail:
            return list(found)
        sizes = {key: self.objects.file(key).stat().st_size if kind == "file" else 0 for key, kind in found.items()}
        return [{"name": key, "type": kind, "size": sizes[key]} for key, kind in found.items()]

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        """Nothing: a store has no folders."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Nothing, likewise."""

    def rm_file(self, path: str) -> None:
        """Deletes an object; a folder is none."""
        self.objects.file(str(self._strip_protocol(path))).unlink(missing_ok=True)

    def mv(self, *_: Any, **__: Any) -> None:
        """Refused."""
        raise AssertionError("a store has no renames")

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: int | None = None,
        autocommit: bool = True,
        cache_options: dict[str, Any] | None = None,
        **_: Any,
    ) -> Any:
        if mode == "rb":
            return self.objects.file(path).open("rb")
        if self.holds and path.endswith(self.holds):
            threading.Event().wait()
        if self.refuses and self.refuses in path:
            raise PermissionError(f"403: no storage.objects.create access to {path}")
        return _Upload(self.objects, path)


class _Upload(io.BytesIO):
    """An object that is there once it is closed."""

    def __init__(self, objects: Objects, key: str):
        super().__init__()
        self._objects, self._key = objects, key

    def close(self) -> None:
        if not self.closed:
            self._objects.put(self._key, self.getvalue())
        super().close()


class _Handler(BaseHTTPRequestHandler):
    """The part of https://cloud.google.com/storage/docs/json_api that tensorstore speaks."""

    objects: Objects
    protocol_version = "HTTP/1.1"

    def _asked(self) -> tuple[str, str | None, dict[str, str]]:
        """Bucket, object and parameters of a request."""
        parts = urlsplit(self.path)
        _, _, rest = parts.path.partition("/b/")
        bucket, _, key = rest.partition("/o")
        return bucket, unquote(key.removeprefix("/")) or None, {k: v[0] for k, v in parse_qs(parts.query).items()}

    def _answer(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def _about(self, bucket: str, key: str) -> dict[str, str]:
        about = self.objects.file(f"{bucket}/{key}").stat()
        return {"name": key, "bucket": bucket, "size": str(about.st_size), "generation": str(about.st_mtime_ns)}

    def do_GET(self) -> None:
        bucket, key, asked = self._asked()
        if key is None:
            keys = self.objects.keys(f"{bucket}/{asked.get('prefix', '')}")
            items = [self._about(bucket, one.removeprefix(f"{bucket}/")) for one in keys]
            return self._answer(200, json.dumps({"items": items}).encode(), Content_Type="application/json")
        file = self.objects.file(f"{bucket}/{key}")
        if not file.exists():
            return self._answer(404)
        generation, content = str(file.stat().st_mtime_ns), file.read_bytes()
        if asked.get("ifGenerationNotMatch") == generation:
            return self._answer(304)
        if (span := self.headers.get("Range")) is None:
            return self._answer(200, content, x_goog_generation=generation)
        first, _, last = span.removeprefix("bytes=").partition("-")
        begin = int(first) if first else len(content) - int(last)
        end = min(int(last) + 1, len(content)) if first and last else len(content)
        return self._answer(
            206,
            content[begin:end],
            x_goog_generation=generation,
            Content_Range=f"bytes {begin}-{end - 1}/{len(content)}",
        )

    def do_POST(self) -> None:
        bucket, _, asked = self._asked()
        content = self.rfile.read(int(self.headers["Content-Length"]))
        file = self.objects.file(f"{bucket}/{asked['name']}")
        generation = str(file.stat().st_mtime_ns) if file.exists() else "0"
        if asked.get("ifGenerationMatch", generation) != generation:
            return self._answer(412)
        self.objects.put(f"{bucket}/{asked['name']}", content)
        self._answer(200, json.dumps(self._about(bucket, asked["name"])).encode(), Content_Type="application/json")

    def do_DELETE(self) -> None:
        bucket, key, _ = self._asked()
        self.objects.file(f"{bucket}/{key}").unlink(missing_ok=True)
        self._answer(204)

    def log_message(self, format: str, *args: Any) -> None:
        """Nothing."""


@contextmanager
def served(root: Path) -> Iterator[str]:
    """The address under which tensorstore finds the buckets in a folder."""
    handler = type("Handler", (_Handler,), {"objects": Objects(root)})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()


def environment(address: str) -> dict[str, str]:
    """What leads tensorstore there; it reads this once in a process."""
    return {"TENSORSTORE_GCS_HTTP_URL": address, "GOOGLE_AUTH_TOKEN_FOR_TESTING": "none"}


def main() -> int:
    """Runs `tunix` with the store in a folder."""
    root, *words = sys.argv[1:]
    store = FakeStore(Path(root))
    backend._FileSystemSpecBackend.fs = lambda self, path: store
    from tunix.cli import main as tunix

    return tunix(words)


if __name__ == "__main__":
    sys.exit(main())
