"""A Hub on the loopback interface, with just enough of the protocol to push and load a team."""

import base64
import hashlib
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlparse


class Hub:
    """Repositories in memory. `files[repo][path]` holds bytes; `commits` the messages, in order."""

    def __init__(self):
        self.files: dict[str, dict[str, bytes]] = {}
        self.objects: dict[str, bytes] = {}
        self.commits: list[tuple[str, str]] = []
        self.fail_commits = False
        handler = type("Handler", (_Handler,), {"hub": self})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()

    def sha(self, repo: str) -> str:
        state = repr(sorted((path, hashlib.sha256(data).hexdigest()) for path, data in self.files[repo].items()))
        return hashlib.sha1(state.encode()).hexdigest()  # noqa: S324 - a commit id


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def _send(self, status, body=b"", headers=None, head=False):
        if not isinstance(body, bytes):
            body = json.dumps(body).encode()
        self.send_response(status)
        usual = {"Content-Length": str(len(body)), "Content-Type": "application/json"}
        for name, value in (usual | (headers or {})).items():
            self.send_header(name, value)
        self.end_headers()
        if not head:
            self.wfile.write(body)

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") == "chunked":
            data = b""
            while size := int(self.rfile.readline().strip() or b"0", 16):
                data += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return data
        return self.rfile.read(int(self.headers.get("Content-Length") or 0))

    def do_POST(self):
        path, body = unquote(urlparse(self.path).path), self._body()
        if path == "/api/validate-yaml":
            local = re.search(r"base_model: */", json.loads(body)["content"])
            errors = [{"message": "base_model is not a valid model id"}] if local else []
            self._send(400 if errors else 200, {"errors": errors, "warnings": []})
        elif path == "/api/repos/create":
            data = json.loads(body)
            repo = f"{data.get('organization') or 'user'}/{data['name']}"
            exists = repo in self.hub.files
            self.hub.files.setdefault(repo, {})
            self._send(409 if exists else 200, {"url": f"{self.hub.url}/{repo}", "id": repo})
        elif match := re.fullmatch(r"/api/models/(.+)/preupload/.+", path):
            modes = {True: "lfs", False: "regular"}
            paths = [file["path"] for file in json.loads(body)["files"]]
            files = [(path, modes[path.endswith((".safetensors", ".bin"))]) for path in paths]
            upload_modes = [{"path": path, "uploadMode": mode, "shouldIgnore": False} for path, mode in files]
            self._send(200, {"files": upload_modes})
        elif path.endswith(".git/info/lfs/objects/batch"):
            blobs = json.loads(body)["objects"]
            for blob in blobs:
                blob["actions"] = {"upload": {"href": f"{self.hub.url}/lfs/{blob['oid']}"}}
            kind = {"Content-Type": "application/vnd.git-lfs+json"}
            self._send(200, {"objects": blobs, "transfer": "basic"}, kind)
        elif match := re.fullmatch(r"/api/models/(.+)/commit/.+", path):
            self._commit(match[1], body)
        else:
            self._send(404, {"error": path})

    def _commit(self, repo, body):
        if self.hub.fail_commits:
            return self._send(403, {"error": "no write access"})
        for line in body.splitlines():
            entry = json.loads(line)
            key, value = entry["key"], entry["value"]
            if key == "header":
                self.hub.commits.append((repo, value["summary"]))
            elif key == "file":
                self.hub.files[repo][value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                self.hub.files[repo][value["path"]] = self.hub.objects[value["oid"]]
            elif key == "deletedFile":
                self.hub.files[repo].pop(value["path"], None)
        sha = self.hub.sha(repo)
        self._send(200, {"commitUrl": f"{self.hub.url}/{repo}/commit/{sha}", "commitOid": sha, "success": True})

    def do_PUT(self):
        self.hub.objects[self.path.rsplit("/", 1)[1]] = self._body()
        self._send(200)

    def do_GET(self, head=False):
        path = unquote(urlparse(self.path).path)
        if path == "/api/whoami-v2":
            return self._send(200, {"name": "user", "type": "user", "orgs": [], "auth": {"type": "access_token"}})
        if match := re.fullmatch(r"/api/models/(.+?)(?:/(tree|revision)/([^/]+)(/.*)?)?", path):
            return self._info(match[1], match[2] == "tree")
        if match := re.fullmatch(r"/(.+?)/resolve/([^/]+)/(.+)", path):
            return self._resolve(match[1], match[3], head)
        return self._send(404, {"error": path}, {"X-Error-Code": "RepoNotFound"}, head)

    def do_HEAD(self):
        self.do_GET(head=True)

    def _info(self, repo, is_tree):
        if repo not in self.hub.files:
            return self._send(404, {"error": "no repo"}, {"X-Error-Code": "RepoNotFound"})
        files = self.hub.files[repo].items()
        if is_tree:
            ids = {path: hashlib.sha1(data).hexdigest() for path, data in files}  # noqa: S324
            tree = [{"type": "file", "path": path, "size": len(data), "oid": ids[path]} for path, data in files]
            return self._send(200, tree)
        siblings = [{"rfilename": path} for path, _ in files]
        self._send(200, {"id": repo, "sha": self.hub.sha(repo), "siblings": siblings, "tags": [], "private": False})

    def _resolve(self, repo, path, head):
        data = self.hub.files.get(repo, {}).get(path)
        if data is None:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Repo-Commit": "0" * 40}, head)
        etag = hashlib.sha256(data).hexdigest()
        headers = {"ETag": f'"{etag}"', "X-Repo-Commit": self.hub.sha(repo), "X-Linked-Size": str(len(data))}
        self._send(200, data, headers, head)
