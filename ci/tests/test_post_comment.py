"""The comment on a pull request: `ci/post_comment.sh` with a `gh` that answers from files."""

import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[1] / "post_comment.sh"
SHA = "0123456789abcdef0123456789abcdef01234567"
PAGE = "## ❌ Gate: NO-GO\n\n| | case |\n|:--|:--|\n| ❌ NO-GO | `train/nsa` |\n"
GH = """\
#!/bin/sh
case "$1 $2" in
  "api repos/owner/project/actions/runs/7/artifacts?per_page=100") ls artifacts ;;
  "api repos/owner/project/pulls/42") cat pull ;;
  "run download") [ "$3" = 7 ] && cp -r "artifacts/$5" "$7" ;;
  "pr comment") echo "$3 $4 $5" > posted; cp "$7" body ;;
  *) exit 1 ;;
esac
"""


class Forge:
    """A pull request with number 42, and the artifacts of its run."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "gh").write_text(GH)
        (folder / "gh").chmod(0o755)
        (folder / "pull").write_text(f"open {SHA} stranger/fork\n")
        self.leave("gate-comment-hosted", PAGE)

    def leave(self, name: str, page: str, number: str = "42\n") -> None:
        artifact = self.folder / "artifacts" / name
        artifact.mkdir(parents=True, exist_ok=True)
        (artifact / "comment.md").write_text(page)
        (artifact / "pr.txt").write_text(number)

    def post(self) -> "subprocess.CompletedProcess[str]":
        env = {"PATH": f"{self.folder}:/usr/bin:/bin", "TMPDIR": str(self.folder)}
        env |= {"GH_REPO": "owner/project", "RUN_ID": "7", "RUN_URL": "https://github.com/run/7"}
        env |= {"HEAD_SHA": SHA, "HEAD_REPOSITORY": "stranger/fork"}
        return subprocess.run(
            ["bash", str(SCRIPT)], cwd=self.folder, env=env, capture_output=True, text=True
        )

    def body(self) -> str:
        done = self.post()
        assert done.returncode == 0, done.stdout + done.stderr
        return (self.folder / "body").read_text()


@pytest.fixture
def forge(tmp_path: Path) -> Forge:
    return Forge(tmp_path)


def test_the_pages_of_both_jobs_are_one_comment_that_the_next_run_edits(forge: Forge) -> None:
    forge.leave("gate-comment-gpu", "## Of the GPU\n")
    forge.leave("gate-comment-of-a-stranger", "never read\n")

    body = forge.body()

    assert (forge.folder / "posted").read_text() == "42 --edit-last --create-if-none\n"
    first, *_, last = body.splitlines()
    assert "the check, not the page, decides" in first
    assert PAGE in body
    assert body.index("Gate: NO-GO") < body.index("Of the GPU")
    assert "never read" not in body
    assert last == f"[Run 7](https://github.com/run/7) of {SHA[:12]}"


@pytest.mark.parametrize("number", ["", "0", "-1", "42; id", "4 2", "$(id)", "42/merge", "9" * 12])
def test_a_number_that_is_none_is_refused(forge: Forge, number: str) -> None:
    forge.leave("gate-comment-hosted", PAGE, number)

    refused = forge.post()

    assert (refused.returncode, "::error" in refused.stdout) == (1, True)
    assert not (forge.folder / "posted").exists()


@pytest.mark.parametrize(
    "pull",
    [f"closed {SHA} stranger/fork", f"open {'f' * 40} stranger/fork", f"open {SHA} else/fork"],
)
def test_only_the_open_pull_request_whose_head_ran_gets_a_comment(forge: Forge, pull: str) -> None:
    (forge.folder / "pull").write_text(pull)

    done = forge.post()

    assert (done.returncode, "not posted" in done.stdout) == (0, True)
    assert not (forge.folder / "posted").exists()


def test_a_page_that_is_a_link_or_absent_is_refused_and_no_page_posts_nothing(forge: Forge) -> None:
    page = forge.folder / "artifacts/gate-comment-hosted/comment.md"
    page.unlink()
    assert forge.post().returncode == 1
    page.symlink_to("pr.txt")
    assert forge.post().returncode == 1
    (forge.folder / "artifacts/gate-comment-hosted").rename(forge.folder / "artifacts/other")
    assert forge.post().returncode == 0
    assert not (forge.folder / "posted").exists()


@pytest.mark.parametrize(
    ("text", "never"),
    [
        ("ask @owner/team", "@o"),
        ("&#64;owner", "&#"),
        ("<img src=x>", "<"),
        ("[free](https://a.example)", "]("),
        ("[a]: //a.example", "]:"),
        ("[a][b]", "]["),
        ("https://a.example", "://a"),
        ("WWW.a.example", "WWW.a"),
        ("closes #12 and GH-12", "12 and GH-12"),
        ("safe\u202etxt\u2066", "\u202e"),
        ("\x1b[31mred\x07", "\x1b"),
    ],
)
def test_text_of_a_page_mentions_links_and_hides_nothing(
    forge: Forge, text: str, never: str
) -> None:
    forge.leave("gate-comment-hosted", f"before {text} after\r\n")

    body = forge.body()

    (line,) = (x for x in body.splitlines() if x.startswith("before "))
    assert line.endswith(" after")
    assert never not in line


def test_two_long_pages_fit_into_one_comment_and_a_longer_one_is_refused(forge: Forge) -> None:
    for name in ("gate-comment-hosted", "gate-comment-gpu"):
        forge.leave(name, "é@" * 80_000)

    body = forge.body()

    assert len(body) <= 65_536
    assert body.count("The page is cut") == 2
    forge.leave("gate-comment-gpu", "x" * 10**6)
    assert forge.post().returncode == 1
