"""Comments on pull requests, tested without a network."""

import io
import json
import re
import urllib.request
import zipfile
from email.message import Message
from pathlib import Path
from typing import Any
from urllib.response import addinfourl

import pytest

from ci.post_comment import AUTHORSHIP, harmless, main, mark

SHA = "0123456789abcdef0123456789abcdef01234567"
PAGE = "## ❌ Gate: NO-GO\n\n| | case |\n|:--|:--|\n| ❌ NO-GO | `train/nsa` |\n"


def packed(**files: bytes | str) -> bytes:
    data = io.BytesIO()
    with zipfile.ZipFile(data, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in files.items():
            archive.writestr(name.replace("_", "."), content)
    return data.getvalue()


class GitHub:
    """What GitHub has, and the requests to it."""

    def __init__(self, event_path: Path) -> None:
        self.event_path = event_path
        self.event: dict[str, Any] = {
            "id": 7,
            "event": "pull_request",
            "head_sha": SHA,
            "head_repository": {"full_name": "stranger/fork"},
        }
        self.pull: dict[str, Any] = {
            "state": "open",
            "base": {"repo": {"full_name": "owner/project"}},
            "head": {"sha": SHA, "repo": {"full_name": "stranger/fork"}},
        }
        self.archives: dict[str, bytes] = {
            "gate-comment-gpu": packed(comment_md=PAGE, pr_txt="42\n")
        }
        self.comments: list[dict[str, Any]] = []
        self.size_in_bytes: int | None = None
        self.seen: list[tuple[str, str, str]] = []

    def answer(self, method: str, path: str, body: Any) -> Any:
        root = "/repos/owner/project"
        names = list(self.archives)
        if path.startswith(f"{root}/actions/runs/7/artifacts"):
            return {
                "artifacts": [
                    {
                        "id": i,
                        "name": name,
                        "expired": False,
                        "size_in_bytes": self.size_in_bytes or len(self.archives[name]),
                    }
                    for i, name in enumerate(names)
                ]
            }
        if m := re.fullmatch(rf"{root}/actions/artifacts/(\d+)/zip", path):
            return f"/blob/{m[1]}"
        if m := re.fullmatch(r"/blob/(\d+)", path):
            return self.archives[names[int(m[1])]]
        if re.fullmatch(rf"{root}/pulls/\d+", path):
            return self.pull
        if method == "GET" and path.startswith(f"{root}/issues/42/comments"):
            page = int(path.rpartition("=")[2])
            return self.comments[100 * (page - 1) : 100 * page]
        if method == "POST" and path == f"{root}/issues/42/comments":
            new = {"id": len(self.comments) + 1000, "user": {"login": "github-actions[bot]"}}
            self.comments.append({**new, **body})
            return new
        if method == "PATCH" and (m := re.fullmatch(rf"{root}/issues/comments/(\d+)", path)):
            (known,) = (c for c in self.comments if c["id"] == int(m[1]))
            known.update(body)
            return known
        return None


@pytest.fixture
def github(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GitHub:
    """GitHub behind the sockets of urllib, which follows redirects as outside tests."""
    state = GitHub(tmp_path / "event.json")
    root = "http://github"

    def http_open(_: object, request: urllib.request.Request) -> addinfourl:
        path, method = request.selector, request.get_method()
        state.seen.append((method, path, request.get_header("Authorization") or ""))
        body = json.loads(request.data) if isinstance(request.data, bytes) else None
        answer = state.answer(method, path, body)
        headers = Message()
        if isinstance(answer, str):
            headers["Location"] = root + answer
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        code = 302 if isinstance(answer, str) else 404 if answer is None else 200
        response = addinfourl(io.BytesIO(data), headers, request.full_url, code)
        response.msg = ""  # type: ignore[attr-defined]
        return response

    monkeypatch.setattr(urllib.request.HTTPHandler, "http_open", http_open)
    for name, value in {
        "API_URL": root,
        "SERVER_URL": "https://github.com",
        "REPOSITORY": "owner/project",
        "TOKEN": "the-token",
        "EVENT_PATH": str(state.event_path),
    }.items():
        monkeypatch.setenv(f"GITHUB_{name}", value)
    return state


def run(github: GitHub) -> int:
    github.event_path.write_text(json.dumps({"workflow_run": github.event}))
    return main()


def changed(github: GitHub) -> list[str]:
    return [method for method, _, _ in github.seen if method != "GET"]


def test_a_page_is_posted_once_and_then_updated(github: GitHub) -> None:
    assert run(github) == 0
    github.archives["gate-comment-gpu"] = packed(comment_md="## ✅ Gate: GO\n", pr_txt="42")
    assert run(github) == 0

    (comment,) = github.comments
    assert changed(github) == ["POST", "PATCH"]
    assert comment["body"].startswith(f"{mark('gpu')}\n{AUTHORSHIP}\n\n## ✅ Gate: GO")
    assert (
        f"[Run 7](https://github.com/owner/project/actions/runs/7) of {SHA[:12]}"
        in (comment["body"])
    )


def test_each_gate_has_its_own_comment(github: GitHub) -> None:
    github.archives["gate-comment-hosted"] = packed(comment_md="hosted", pr_txt="42")
    github.archives["something-else"] = github.archives["gate-comment-x"] = b"no zip"

    assert run(github) == 0
    assert run(github) == 0

    marks = [c["body"].splitlines()[0] for c in github.comments]
    assert marks == ["<!-- nsa-harness gate: gpu -->", "<!-- nsa-harness gate: hosted -->"]


def test_only_the_api_sees_the_token(github: GitHub) -> None:
    run(github)

    shown = {path.startswith("/repos/"): token for _, path, token in github.seen}
    assert shown == {True: "Bearer the-token", False: ""}


def test_a_comment_of_another_author_is_not_changed(github: GitHub) -> None:
    theirs = {"id": 1, "user": {"login": "stranger"}, "body": mark("gpu") + "\nmine"}
    github.comments += [dict(theirs, id=i) for i in range(150)]

    run(github)

    assert changed(github) == ["POST"]
    assert [c["body"] for c in github.comments[:150]] == [theirs["body"]] * 150


@pytest.mark.parametrize(
    ("where", "what"),
    [
        pytest.param(("pull", "state"), "closed", id="closed"),
        pytest.param(("pull", "head", "sha"), "f" * 40, id="another-commit"),
        pytest.param(("event", "event"), "workflow_dispatch", id="no-pull-request"),
        pytest.param(("pull", "head", "repo"), {"full_name": "victim/fork"}, id="of-somebody-else"),
        pytest.param(("pull", "head", "repo"), None, id="fork-deleted"),
        pytest.param(("pull", "base", "repo"), {"full_name": "other/project"}, id="elsewhere"),
    ],
)
def test_only_the_tested_pull_request_gets_a_comment(
    github: GitHub, where: tuple[str, ...], what: Any
) -> None:
    place: Any = vars(github)
    for step in where[:-1]:
        place = place[step]
    place[where[-1]] = what

    assert run(github) == 0

    assert changed(github) == []


@pytest.mark.parametrize(
    "archive",
    [
        pytest.param(b"no zip", id="no-zip"),
        pytest.param(packed(pr_txt="42"), id="no-page"),
        pytest.param(packed(comment_md=PAGE), id="no-number"),
        pytest.param(packed(comment_md=PAGE, pr_txt="42/../43"), id="path-for-number"),
        pytest.param(packed(comment_md=PAGE, pr_txt="٤٢"), id="other-digits"),
        pytest.param(packed(comment_md=PAGE, pr_txt="4" * 10), id="huge-number"),
        pytest.param(packed(comment_md=b"\xff\xfe", pr_txt="42"), id="no-text"),
        pytest.param(packed(comment_md=b"a" * (2**18 + 1), pr_txt="42"), id="bomb"),
    ],
)
def test_a_bad_artifact_is_refused(
    github: GitHub, archive: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    github.archives["gate-comment-gpu"] = archive

    assert run(github) == 1

    assert changed(github) == []
    assert capsys.readouterr().out.startswith("::error title=gate comment::")


@pytest.mark.parametrize(("stated_bytes", "fetched"), [(2**20 + 1, False), (100, True)])
def test_a_large_artifact_is_refused_whatever_its_stated_size(
    github: GitHub, stated_bytes: int, fetched: bool
) -> None:
    github.size_in_bytes = stated_bytes
    github.archives["gate-comment-gpu"] = b"x" * (2**20 + 1)

    assert run(github) == 1

    assert any("blob" in path for _, path, _ in github.seen) is fetched


def test_a_page_is_sanitised_and_shortened(github: GitHub) -> None:
    nasty = (
        "<img src=x> <!-- x --> @owner/team [a](https://evil.example) ![i](//evil.example/i.png)\n"
        "[ref]: https://evil.example\n[b][ref] www.evil.example #1 GH-2 \u202e\x1b[31m\u200f\r\n"
        "&commat;me &num;5\n"
    )
    github.archives["gate-comment-gpu"] = packed(comment_md=nasty + PAGE * 2500, pr_txt="42")

    assert run(github) == 0

    (body,) = (c["body"] for c in github.comments)
    assert len(body) <= 65_536
    first, author, *lines, source = body.strip().splitlines()
    text = "\n".join(lines)
    assert (first, author) == (mark("gpu"), AUTHORSHIP)
    assert source.startswith("[Run 7](https://github.com/owner/project/actions/runs/7)")
    assert "The page was too long for a comment" in text
    unwanted = (
        "<",
        "@owner",
        "](",
        "]:",
        "][",
        "://",
        "www.",
        "#1",
        "GH-2",
        "&commat",
        "&num",
        "\x1b",
        "\u202e",
    )
    assert [word for word in unwanted if word in text] == []
    assert "| ❌ NO-GO | `train/nsa` |" in text


def test_a_page_of_the_gate_is_not_changed() -> None:
    from harness.integrations.page import comment
    from harness.tests.fake_verdicts import FASTER, OPEN, SLOWER, gate_verdict

    page = comment(gate_verdict(SLOWER, OPEN, FASTER))

    assert harmless(page) == page.strip()
