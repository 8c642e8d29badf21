"""A W&B server of our own on the loopback interface: enough GraphQL, file stream and upload for one run.

It answers what wandb-core asks from start to finish and keeps what it was told. Operations it does not know
are kept in `unknown` and answered with empty data.
"""

import gzip
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """wandb-core drops its idle connections when it exits; that is no error of the test."""


class FakeWandb:
    """`with FakeWandb() as server:` serves on `server.url` until the block ends.

    Attributes:
        config: the run's configuration, name → value. run: name, project, group, job type, tags, …
        history: rows in order. summary: name → value. exit_code: None until the run ended.
        files: uploaded path → content. artifacts: committed artifacts' type names, in any order.
        views: saved workspaces, as they were sent.
        denied: answer 401 to everything, as a server does to a wrong key.
        stalled: answer 503 to the file stream, as an overloaded server does.
    """

    def __init__(self, denied: bool = False, stalled: bool = False) -> None:
        self.denied, self.stalled = denied, stalled
        self.config: dict[str, Any] = {}
        self.run: dict[str, Any] = {}
        self.history: list[dict[str, Any]] = []
        self.summary: dict[str, Any] = {}
        self.exit_code: int | None = None
        self.files: dict[str, bytes] = {}
        self.artifacts: list[str] = []
        self.unknown: list[str] = []
        self.operations: list[str] = []
        self.views: list[dict[str, Any]] = []
        self._pending: dict[str, str] = {}
        self._lock = threading.Lock()
        self._server = _Server(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> "FakeWandb":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def graphql(self, query: str, variables: dict[str, Any]) -> dict[str, Any]:
        found = re.search(r"(?:query|mutation)\s+(\w+)", query)
        name = found.group(1) if found else ""
        with self._lock:
            self.operations.append(name)
            answer = getattr(self, f"_on_{name}", None)
            if answer is None:
                self.unknown.append(name)
                return {}
            return answer(variables)

    def file_stream(self, body: dict[str, Any]) -> None:
        with self._lock:
            for name, part in body.get("files", {}).items():
                rows = [json.loads(line) for line in part["content"]]
                if name == "wandb-history.jsonl":
                    del self.history[part["offset"] :]
                    self.history.extend(rows)
                elif name == "wandb-summary.json":
                    self.summary.update(rows[-1])
            if body.get("complete"):
                self.exit_code = body.get("exitcode")

    def upload(self, path: str, content: bytes) -> None:
        with self._lock:
            self.files[path.removeprefix("/upload/")] = content

    def _on_Viewer(self, _: dict[str, Any]) -> dict[str, Any]:
        return {
            "viewer": {"id": "user", "entity": "tester", "username": "tester", "flags": "{}", "teams": None}
        }

    def _on_UpsertBucket(self, variables: dict[str, Any]) -> dict[str, Any]:
        for name, item in json.loads(variables.get("config") or "{}").items():
            self.config[name] = item["value"]
        self.run.update({name: value for name, value in variables.items() if value is not None})
        project = {
            "id": "project",
            "name": self.run["project"],
            "entity": {"id": "entity", "name": "tester"},
        }
        bucket = {
            "id": "bucket",
            "name": self.run["name"],
            "displayName": self.run.get("displayName"),
            "description": None,
            "config": "{}",
            "sweepName": None,
            "project": project,
            "historyLineCount": 0,
        }
        return {"upsertBucket": {"bucket": bucket, "inserted": True}}

    def _on_UpsertView2(self, variables: dict[str, Any]) -> dict[str, Any]:
        self.views.append(variables)
        view = {"id": f"view-{len(self.views)}", "name": variables["name"]}
        return {"upsertView": {"view": view, "inserted": True}}

    def _on_CreateRunFiles(self, variables: dict[str, Any]) -> dict[str, Any]:
        files = [{"name": name, "uploadUrl": f"{self.url}/upload/{name}"} for name in variables["files"]]
        return {"createRunFiles": {"runID": "bucket", "uploadHeaders": [], "files": files}}

    def _on_ServerFeaturesQuery(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"serverInfo": {"features": []}}

    def _on_ArtifactType(self, _: dict[str, Any]) -> dict[str, Any]:
        return {"project": {"artifact": None}}

    def _on_CreateArtifact(self, variables: dict[str, Any]) -> dict[str, Any]:
        asked = variables["input"]
        number = len(self._pending)
        self._pending[f"artifact-{number}"] = asked["artifactTypeName"]
        sequence = {"id": f"sequence-{number}", "latestArtifact": None}
        artifact = {"id": f"artifact-{number}", "state": "PENDING", "artifactSequence": sequence}
        return {"createArtifact": {"artifact": artifact}}

    def _manifest(self, name: str) -> dict[str, Any]:
        file = {"id": name, "uploadUrl": f"{self.url}/upload/{name}", "uploadHeaders": []}
        return {"artifactManifest": {"id": name, "file": file}}

    def _on_CreateArtifactManifest(self, variables: dict[str, Any]) -> dict[str, Any]:
        return {"createArtifactManifest": self._manifest(f"{variables['artifactID']}/manifest.json")}

    def _on_UpdateArtifactManifest(self, variables: dict[str, Any]) -> dict[str, Any]:
        return {"updateArtifactManifest": self._manifest(variables["artifactManifestID"])}

    def _on_CreateArtifactFiles(self, variables: dict[str, Any]) -> dict[str, Any]:
        edges = []
        for file in variables["input"]["artifactFiles"]:
            path = f"{file['artifactID']}/{file['name']}"
            node = {
                "storagePath": path,
                "uploadUrl": f"{self.url}/upload/{path}",
                "uploadHeaders": [],
                "uploadMultipartUrls": None,
                "artifact": {"id": file["artifactID"]},
            }
            edges.append({"node": node})
        return {"createArtifactFiles": {"files": {"edges": edges}}}

    def _on_CommitArtifact(self, variables: dict[str, Any]) -> dict[str, Any]:
        number = variables["artifactID"]
        self.artifacts.append(self._pending[number])
        return {"commitArtifact": {"artifact": {"id": number, "digest": ""}}}

    def _handler(server) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                if server.denied:
                    self.reply(401, {"errors": [{"message": "user is not logged in"}]})
                elif self.path == "/graphql":
                    asked = json.loads(body)
                    data = server.graphql(asked["query"], asked.get("variables") or {})
                    self.reply(200, {"data": data})
                elif self.path.endswith("/file_stream") and server.stalled:
                    self.reply(503, {"errors": [{"message": "overloaded"}]})
                elif self.path.endswith("/file_stream"):
                    server.file_stream(json.loads(body))
                    self.reply(200, {})
                else:
                    server.upload(self.path, body)
                    self.reply(200, {})

            do_GET = do_POST = do_PUT = answer

            def reply(self, status: int, content: dict[str, Any]) -> None:
                text = json.dumps(content).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text)

            def log_message(self, *_: object) -> None:
                pass

        return Handler
