"""A stand-in for the Hugging Face Hub: its HTTP protocol for models, with large files over LFS, and trouble on demand.

    with HubStandIn() as hub:
        hub.use(monkeypatch)  # the real huggingface_hub client of this process; hub.environment for another one
        hub.fail(500, times=2, path="/commit/")
        HfApi().upload_folder(repo_id="tester/model", folder_path=folder)
        hub.repos["tester/model"].files()["model.safetensors"]

What is not here: Xet, which huggingface_hub prefers where it is installed (the stand-in's users switch it off).
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, Self
from urllib.parse import unquote, urlsplit

import pytest

USER, TOKEN = "tester", "hf_token_for_tests"
LFS_BYTES = 10_000
"""Larger files, and all safetensors, go over LFS (the Hub: 10 MB)."""

Answer = tuple[int, Any]


@dataclass
class Repo:
    """A repository: branches to commits, commits to their files."""

    private: bool
    branches: dict[str, str] = field(default_factory=dict)
    commits: dict[str, dict[str, bytes]] = field(default_factory=dict)
    messages: list[str] = field(default_factory=list)

    def files(self, revision: str = "main") -> dict[str, bytes]:
        return self.commits[self.branches.get(revision, revision)]

    def commit(self, branch: str, files: dict[str, bytes], message: str) -> str:
        oid = hashlib.sha1(f"{len(self.commits)} {message}".encode()).hexdigest()
        self.commits[oid], self.branches[branch] = files, oid
        self.messages.append(message)
        return oid


@dataclass
class _Trouble:
    status: int
    times: float
    path: str


class HubStandIn:
    """Started on entry on a free port of this machine. `role` is that of the token; `requests` are those answered."""

    def __init__(self, role: str = "write"):
        self.role = role
        self.repos: dict[str, Repo] = {}
        self.large: dict[str, bytes] = {}  # by sha256
        self.requests: list[str] = []
        self._trouble: list[_Trouble] = []
        self._silent = threading.Event()
        self._resumed = threading.Event()
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                self.close_connection = stand_in.hold(self.path)
                status, answer = stand_in.answer(self.command, self.path, body, self.headers)
                content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                if status >= 400:
                    self.send_header("X-Error-Message", answer["error"])
                self.send_header("Content-Length", str(len(content)))
                self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
                self.send_header("X-Repo-Commit", "0" * 40)
                if self.close_connection:  # said, or the client's next request may meet the closing connection
                    self.send_header("Connection", "close")
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(content)

            do_GET = do_HEAD = do_POST = do_PUT = handle_any

            def log_message(self, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *args: None  # a client that went away
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        self.environment = {
            "HF_ENDPOINT": self.url,
            "HF_TOKEN": TOKEN,
            "HF_HUB_DISABLE_XET": "1",
            "HF_HUB_OFFLINE": "0",
        }

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self.speak()
        self._server.shutdown()
        self._server.server_close()

    def use(self, monkeypatch: pytest.MonkeyPatch, *, token: str | None = TOKEN) -> None:
        """Point the huggingface_hub of this process here."""
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "ENDPOINT", self.url)
        template = f"{self.url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", "/nowhere")
        monkeypatch.setattr(constants, "HF_STORED_TOKENS_PATH", "/nowhere")
        monkeypatch.delenv("HUGGING_FACE_HUB_TOKEN", raising=False)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        if token:
            monkeypatch.setenv("HF_TOKEN", token)

    # --- trouble --------------------------------------------------------------------------------------------------

    def fail(self, status: int, *, times: float = float("inf"), path: str = "") -> None:
        """Answer the next requests whose path contains `path` with an error."""
        self._trouble.append(_Trouble(status, times, path))

    def mend(self) -> None:
        self._trouble.clear()

    def fall_silent(self) -> None:
        """Take requests and answer none, until `speak`."""
        self._resumed.clear()
        self._silent.set()

    def speak(self) -> None:
        self._silent.clear()
        self._resumed.set()

    def hold(self, path: str) -> bool:
        """Wait while the stand-in is silent; return whether it was."""
        if not self._silent.is_set():
            return False
        self.requests.append(f"silent {path}")
        return self._resumed.wait()

    # --- the protocol ---------------------------------------------------------------------------------------------

    def answer(self, method: str, path: str, body: bytes, headers: Any) -> Answer:
        path = urlsplit(path).path
        self.requests.append(f"{method} {path}")
        for trouble in self._trouble:
            if trouble.times > 0 and trouble.path in path:
                trouble.times -= 1
                return trouble.status, {"error": f"trouble {trouble.status}"}
        if not path.startswith("/lfs/") and headers.get("Authorization") != f"Bearer {TOKEN}":
            return 401, {"error": "Invalid credentials"}
        for pattern, route in _ROUTES:
            if found := re.fullmatch(pattern, f"{method} {path}"):
                return route(self, body, *map(unquote, found.groups()))
        return 404, {"error": f"no such route: {method} {path}"}

    def whoami(self, body: bytes) -> Answer:
        return 200, {"name": USER, "auth": {"accessToken": {"displayName": "test", "role": self.role}}}

    def create(self, body: bytes) -> Answer:
        wanted = json.loads(body)
        repo_id = f"{wanted.get('organization') or USER}/{wanted['name']}"
        if not repo_id.startswith(f"{USER}/"):
            return 403, {"error": f"You don't have the rights to create {repo_id}"}
        answer = {"url": f"{self.url}/{repo_id}", "name": repo_id}
        if repo_id in self.repos:
            return 409, answer | {"error": "You already created this model repo"}
        repo = self.repos[repo_id] = Repo(wanted.get("visibility") == "private" or bool(wanted.get("private")))
        repo.commit("main", {".gitattributes": b"*.safetensors filter=lfs"}, "initial commit")
        return 200, answer

    def validate_yaml(self, body: bytes) -> Answer:
        return 200, {"errors": [], "warnings": []}

    def preupload(self, body: bytes, repo_id: str, revision: str) -> Answer:
        if revision not in self.repos[repo_id].branches:
            return 404, {"error": f"Invalid rev id: {revision}"}
        modes = []
        for file in json.loads(body)["files"]:
            large = file["size"] > LFS_BYTES or file["path"].endswith(".safetensors")
            modes.append({"path": file["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False})
        return 200, {"files": modes}

    def batch(self, body: bytes, repo_id: str) -> Answer:
        def upload(wanted: dict[str, Any]) -> dict[str, Any]:
            if wanted["oid"] in self.large:
                return wanted
            actions = {
                "upload": {"href": f"{self.url}/lfs/{wanted['oid']}"},
                "verify": {"href": f"{self.url}/lfs/{wanted['oid']}/verify"},
            }
            return wanted | {"actions": actions}

        return 200, {"transfer": "basic", "objects": [upload(wanted) for wanted in json.loads(body)["objects"]]}

    def put(self, body: bytes, oid: str) -> Answer:
        if hashlib.sha256(body).hexdigest() != oid:
            return 400, {"error": "content does not match its oid"}
        self.large[oid] = body
        return 200, {}

    def verify(self, body: bytes, oid: str) -> Answer:
        whole = oid in self.large and len(self.large[oid]) == json.loads(body)["size"]
        return (200, {}) if whole else (422, {"error": "object is not there"})

    def commit(self, body: bytes, repo_id: str, revision: str) -> Answer:
        repo = self.repos[repo_id]
        lines = [json.loads(line) for line in body.splitlines()]
        files, message = dict(repo.files(revision)), ""
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                message = value["summary"]
            elif line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.large[value["oid"]]
            elif line["key"] == "deletedFile":
                del files[value["path"]]
        oid = repo.commit(revision, files, message)
        return 200, {"commitUrl": f"{self.url}/{repo_id}/commit/{oid}", "commitOid": oid, "pullRequestUrl": None}

    def branch(self, body: bytes, repo_id: str, name: str) -> Answer:
        repo = self.repos[repo_id]
        if name in repo.branches:
            return 409, {"error": f"Reference already exists: {name}"}
        start = json.loads(body or b"{}").get("startingPoint", "main")
        repo.branches[name] = repo.branches.get(start, start)
        return 200, {}

    def info(self, body: bytes, repo_id: str, revision: str = "main") -> Answer:
        if repo_id not in self.repos:
            return 404, {"error": "Repository not found"}
        repo = self.repos[repo_id]
        names = [{"rfilename": name} for name in sorted(repo.files(revision))]
        sha = repo.branches.get(revision, revision)
        return 200, {"id": repo_id, "modelId": repo_id, "private": repo.private, "sha": sha, "siblings": names}

    def tree(self, body: bytes, repo_id: str, revision: str) -> Answer:
        files = self.repos[repo_id].files(revision).items()
        return 200, [{"type": "file", "path": path, "size": len(content), "oid": "0" * 40} for path, content in files]

    def resolve(self, body: bytes, repo_id: str, revision: str, path: str) -> Answer:
        files = self.repos[repo_id].files(revision)
        return (200, files[path]) if path in files else (404, {"error": "Entry not found"})


_REPO = r"([\w.-]+/[\w.-]+)"
_ROUTES: tuple[tuple[str, Callable[..., Answer]], ...] = (
    (r"GET /api/whoami-v2", HubStandIn.whoami),
    (r"POST /api/repos/create", HubStandIn.create),
    (r"POST /api/validate-yaml", HubStandIn.validate_yaml),
    (rf"POST /api/models/{_REPO}/preupload/([^/]+)", HubStandIn.preupload),
    (rf"POST /{_REPO}\.git/info/lfs/objects/batch", HubStandIn.batch),
    (r"PUT /lfs/(\w+)", HubStandIn.put),
    (r"POST /lfs/(\w+)/verify", HubStandIn.verify),
    (rf"POST /api/models/{_REPO}/commit/([^/]+)", HubStandIn.commit),
    (rf"POST /api/models/{_REPO}/branch/([^/]+)", HubStandIn.branch),
    (rf"GET /api/models/{_REPO}/revision/([^/]+)", HubStandIn.info),
    (rf"GET /api/models/{_REPO}/tree/([^/]+)", HubStandIn.tree),
    (rf"GET /api/models/{_REPO}", HubStandIn.info),
    (rf"(?:GET|HEAD) /{_REPO}/resolve/([^/]+)/(.+)", HubStandIn.resolve),
)
