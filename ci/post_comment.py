#!/usr/bin/env python3
"""Post a gate's verdict as a comment on its pull request, or update that comment.

This is the second of two workflows. The first runs the code of a pull request, perhaps from a fork,
without secrets and write permission, and uploads `gate-comment-*` artifacts: the page `comment.md`
and the number `pr.txt`. This one runs from the default branch and may write comments. It executes
nothing from the artifact: it reads the archive in memory with a size limit, accepts only the number
of the open pull request whose head was run, and removes mentions, links and HTML from the page.

It uses only the standard library, so that nothing is installed where a token can write.

Environment: GITHUB_TOKEN, GITHUB_API_URL, GITHUB_SERVER_URL, GITHUB_REPOSITORY, GITHUB_EVENT_PATH.
"""

import io
import json
import os
import re
import sys
import unicodedata
import urllib.error
import urllib.request
import zipfile
import zlib
from pathlib import Path
from typing import Any

MAX_EVENT_BYTES = 16 * 2**20
MAX_ARCHIVE_BYTES = 2**20
MAX_PAGE_BYTES = 2**18
MAX_NUMBER_BYTES = 16
MAX_ANSWER_BYTES = 16 * 2**20
MAX_COMMENT = 65_536  # characters; GitHub refuses more
MAX_COMMENT_PAGES = 30  # of a hundred comments each
MAX_ARTIFACTS = 8
ARTIFACT = re.compile(r"gate-comment-(hosted|gpu)")
TIMEOUT_S = 30
AUTHOR = "github-actions[bot]"  # author of comments made with the token of a workflow
_UNREADABLE = (
    zipfile.BadZipFile,
    zlib.error,
    UnicodeDecodeError,
    NotImplementedError,  # unknown compression
    RuntimeError,  # encrypted
)
AUTHORSHIP = "_The run of this change's author wrote this page: the check, not the page, decides._"
HIDDEN = "\u200b"  # zero-width space


class Refused(Exception):
    """Invalid input or a failed request; nothing was posted."""


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The archive is on another host, which must not see our token."""

    def redirect_request(self, *_: Any) -> None:
        return None


class GitHub:
    """The calls that this script needs."""

    def __init__(self, api: str, repository: str, token: str) -> None:
        self._root = f"{api}/repos/{repository}"
        self._token = token
        self._opener = urllib.request.build_opener(_NoRedirect)

    def get(self, path: str) -> Any:
        return json.loads(self._call("GET", self._root + path, None, MAX_ANSWER_BYTES))

    def send(self, method: str, path: str, body: dict[str, str]) -> Any:
        data = json.dumps(body).encode()
        return json.loads(self._call(method, self._root + path, data, MAX_ANSWER_BYTES))

    def archive(self, artifact_id: int) -> bytes:
        """The zip file of an artifact."""
        url = f"{self._root}/actions/artifacts/{artifact_id}/zip"
        return self._call("GET", url, None, MAX_ARCHIVE_BYTES)

    def _call(self, method: str, url: str, body: bytes | None, most: int) -> bytes:
        request = urllib.request.Request(url, data=body, method=method)
        request.add_header("Authorization", f"Bearer {self._token}")
        request.add_header("Accept", "application/vnd.github+json")
        request.add_header("X-GitHub-Api-Version", "2022-11-28")
        try:
            with self._opener.open(request, timeout=TIMEOUT_S) as answer:
                return _limited(answer, most, url)
        except urllib.error.HTTPError as error:
            place = error.headers.get("Location", "")
            if method == "GET" and error.code in (302, 307) and place:
                with urllib.request.urlopen(place, timeout=TIMEOUT_S) as answer:
                    return _limited(answer, most, url)
            raise Refused(f"{method} {url}: HTTP {error.code}") from None
        except (urllib.error.URLError, TimeoutError) as error:
            raise Refused(f"{method} {url}: {error}") from None


def main() -> int:
    try:
        event = json.loads(_file(Path(os.environ["GITHUB_EVENT_PATH"]), MAX_EVENT_BYTES))
        repository = os.environ["GITHUB_REPOSITORY"]
        github = GitHub(os.environ["GITHUB_API_URL"], repository, os.environ["GITHUB_TOKEN"])
        server = os.environ["GITHUB_SERVER_URL"]
        for line in post(github, repository, server, event["workflow_run"]):
            print(line)
    except Refused as reason:
        print(f"::error title=gate comment::{_command(str(reason))}")
        return 1
    return 0


def post(github: GitHub, repository: str, server: str, run: dict[str, Any]) -> list[str]:
    """Post every page of the run; returns a line for each."""
    if run["event"] != "pull_request":
        return ["not a pull request: nothing to comment"]
    listed = github.get(f"/actions/runs/{int(run['id'])}/artifacts?per_page=100")["artifacts"]
    found = [(m[1], a) for a in listed if (m := ARTIFACT.fullmatch(str(a["name"])))]
    if len(found) > MAX_ARTIFACTS:
        raise Refused(f"{len(found)} artifacts to comment; at most {MAX_ARTIFACTS} are allowed")
    done = []
    for key, artifact in found:
        if artifact["expired"] or artifact["size_in_bytes"] > MAX_ARCHIVE_BYTES:
            raise Refused(f"artifact {key}: expired, or larger than {MAX_ARCHIVE_BYTES} bytes")
        number, page = unpacked(github.archive(int(artifact["id"])))
        if why := mismatch(github.get(f"/pulls/{number}"), repository, run):
            done.append(f"{key}: not posted: {why}")
            continue
        body = comment(page, key, f"{server}/{repository}/actions/runs/{int(run['id'])}", run)
        known = earlier(github, number, mark(key))
        if known is None:
            github.send("POST", f"/issues/{number}/comments", {"body": body})
            done.append(f"{key}: posted to pull request {number}")
        else:
            github.send("PATCH", f"/issues/comments/{known}", {"body": body})
            done.append(f"{key}: updated comment {known} of pull request {number}")
    return done or ["no page: nothing to comment"]


def unpacked(archive: bytes) -> tuple[int, str]:
    """Number and page from an artifact; nothing is written to disk."""
    try:
        with zipfile.ZipFile(io.BytesIO(archive)) as packed:
            number = _member(packed, "pr.txt", MAX_NUMBER_BYTES).decode("ascii").strip()
            page = _member(packed, "comment.md", MAX_PAGE_BYTES).decode()
    except _UNREADABLE as error:
        raise Refused(f"cannot read the artifact: {error}") from None
    if not re.fullmatch(r"[1-9][0-9]{0,8}", number):
        raise Refused("pr.txt does not contain the number of a pull request")
    return int(number), page


def mismatch(pull: dict[str, Any], repository: str, run: dict[str, Any]) -> str:
    """Why a pull request is not the one that was run, or an empty string.

    The number comes from the artifact and cannot be trusted; the head commit and its repository
    come from GitHub.
    """
    head = pull["head"]
    if pull["base"]["repo"]["full_name"] != repository:
        return "it belongs to another repository"
    if pull["state"] != "open":
        return "it is closed"
    if (head.get("repo") or {}).get("full_name") != run["head_repository"]["full_name"]:
        return "its head is not in the repository that was run"
    if head["sha"] != run["head_sha"]:
        return "its head is not the commit that was run; a newer run will comment"
    return ""


def comment(page: str, key: str, url: str, run: dict[str, Any]) -> str:
    """The body: our mark, who wrote the page, the sanitised page, and a link to the run."""
    start = f"{mark(key)}\n{AUTHORSHIP}\n\n"
    end = f"\n\n[Run {int(run['id'])}]({url}) of {re.sub('[^0-9a-f]', '', run['head_sha'])[:12]}\n"
    text, cut = harmless(page), "\n\nThe page was too long for a comment; see the run for the rest."
    room = MAX_COMMENT - len(start) - len(end)
    if len(text) > room:
        text = text[: room - len(cut)].rpartition("\n")[0] + cut
    return start + text + end


def harmless(page: str) -> str:
    """Markdown without mentions, links, references, entities and HTML."""
    lines = page.replace("\r\n", "\n").replace("\r", "\n")
    kept = "".join(
        c for c in lines if c == "\n" or unicodedata.category(c) not in ("Cc", "Cf", "Cs")
    )
    for unwanted, instead in (
        ("&", f"&{HIDDEN}"),  # no entity stands for a character below
        ("<", "&lt;"),
        ("@", f"@{HIDDEN}"),
        ("://", f":{HIDDEN}//"),
        ("](", f"]{HIDDEN}("),
        ("]:", f"]{HIDDEN}:"),
        ("][", f"]{HIDDEN}["),
    ):
        kept = kept.replace(unwanted, instead)
    kept = re.sub(r"\bwww\.", f"www{HIDDEN}.", kept, flags=re.IGNORECASE)
    return re.sub(r"#(?=\d)|\bGH-(?=\d)", rf"\g<0>{HIDDEN}", kept).strip()


def mark(key: str) -> str:
    """The first line of our comments, which identifies them."""
    return f"<!-- nsa-harness gate: {key} -->"


def earlier(github: GitHub, number: int, first_line: str) -> int | None:
    """Our earlier comment. The author is checked, because anyone can copy the mark."""
    for page in range(1, MAX_COMMENT_PAGES + 1):
        comments = github.get(f"/issues/{number}/comments?per_page=100&page={page}")
        for c in comments:
            if c["user"]["login"] == AUTHOR and c["body"].splitlines()[:1] == [first_line]:
                return int(c["id"])
        if len(comments) < 100:
            return None
    raise Refused(f"pull request {number} has more than {MAX_COMMENT_PAGES * 100} comments")


def _member(packed: zipfile.ZipFile, name: str, most: int) -> bytes:
    try:
        with packed.open(name) as file:
            return _limited(file, most, name)
    except KeyError:
        raise Refused(f"the artifact has no {name}") from None


def _limited(stream: Any, most: int, name: str) -> bytes:
    data: bytes = stream.read(most + 1)
    if len(data) > most:
        raise Refused(f"{name}: more than {most} bytes")
    return data


def _file(path: Path, most: int) -> bytes:
    with path.open("rb") as file:
        return _limited(file, most, path.name)


def _command(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


if __name__ == "__main__":
    sys.exit(main())
