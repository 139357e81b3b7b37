"""A stand-in for the Hugging Face hub on this machine: it answers the HTTP calls of the client's uploads."""

import base64
import hashlib
import json
import threading
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

TOKEN = "hf_stand_in"


class Hub:
    """repos: name -> {"private": bool, "files": {path: bytes}}. Large files arrive by PUT, as with Git LFS."""

    def __init__(self):
        self.repos = {}
        self.large = {}  # SHA-256 -> content
        self.puts = []  # SHA-256 of each content that was sent
        self.refused_puts = 0  # how many of the next PUTs are refused
        self.unknown = []  # calls that are not answered
        self.commits = 0

    def answer(self, method, path, body, headers):
        """Status, JSON and extra headers."""
        if headers.get("Authorization") != f"Bearer {TOKEN}" and not path.startswith("/put/"):
            return 401, {"error": "Invalid token"}, {}
        parts = path.partition("?")[0].strip("/").split("/")
        match (method, *parts):
            case ("GET", "api", "models", user, name):
                return self.info(f"{user}/{name}")
            case ("POST", "api", "repos", "create"):
                return self.create(json.loads(body))
            case ("POST", "api", "validate-yaml"):
                return 200, {"errors": [], "warnings": []}, {}
            case ("POST", "api", "models", _, _, "preupload", "main"):
                return 200, self.preupload(json.loads(body)), {}
            case ("POST", _, _, "info", "lfs", "objects", "batch"):
                return 200, self.batch(json.loads(body)), {}
            case ("PUT", "put", sha256):
                return self.put(sha256, body)
            case ("POST", "api", "models", user, name, "commit", "main"):
                return 200, self.commit(f"{user}/{name}", body), {}
        self.unknown.append(f"{method} {path}")
        return 404, {"error": "unknown call"}, {}

    def info(self, repo):
        if repo not in self.repos:
            return 404, {"error": "Repository not found"}, {"X-Error-Code": "RepoNotFound"}
        return 200, {"id": repo, "private": self.repos[repo]["private"], "siblings": []}, {}

    def create(self, wanted):
        repo = f"{wanted['organization']}/{wanted['name']}"
        private = wanted.get("private", wanted.get("visibility") == "private")
        answer = {"url": f"{self.address}/{repo}", "name": repo, "id": repo}
        if repo in self.repos:
            return 409, answer | {"error": "You already created this model repo"}, {}
        self.repos[repo] = {"private": private, "files": {}}
        return 200, answer, {}

    def preupload(self, wanted):
        small = (".md", ".json")
        return {
            "files": [
                {
                    "path": file["path"],
                    "uploadMode": "regular" if file["path"].endswith(small) else "lfs",
                    "shouldIgnore": False,
                }
                for file in wanted["files"]
            ]
        }

    def batch(self, wanted):
        objects = []
        for item in wanted["objects"]:
            answer = {"oid": item["oid"], "size": item["size"], "authenticated": True}
            if item["oid"] not in self.large:
                answer["actions"] = {"upload": {"href": f"{self.address}/put/{item['oid']}"}}
            objects.append(answer)
        return {"transfer": "basic", "objects": objects}

    def put(self, sha256, content):
        if self.refused_puts:
            self.refused_puts -= 1
            return 403, {"error": "the line broke"}, {}
        assert hashlib.sha256(content).hexdigest() == sha256
        self.puts.append(sha256)
        self.large[sha256] = content
        return 200, {}, {}

    def commit(self, repo, body):
        files = self.repos[repo]["files"]
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                files[value["path"]] = self.large[value["oid"]]
            else:
                assert line["key"] == "header"
        self.commits += 1
        commit = f"{self.commits:040x}"
        url = f"{self.address}/{repo}/commit/{commit}"
        return {"success": True, "commitOid": commit, "commitUrl": url}


@contextmanager
def stand_in():
    """A running hub, at `hub.address`."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def handle_call(self):
            body = self.body()
            status, answer, headers = hub.answer(self.command, self.path, body, self.headers)
            content = json.dumps(answer).encode()
            self.send_response(status)
            for name, value in {"Content-Type": "application/json", **headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def body(self):
            """With a length, or in chunks that each say theirs."""
            if self.headers.get("Transfer-Encoding") != "chunked":
                return self.rfile.read(int(self.headers.get("Content-Length") or 0))
            content = b""
            while size := int(self.rfile.readline(), 16):
                content += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return content

        do_GET = do_POST = do_PUT = handle_call

        def log_message(self, *arguments):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    hub.address = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
