"""hub_cache: the names of repositories and commits, and their folders in the local cache of the hub."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.registry.errors import ConfigurationError
from penstock.registry.package.hub_cache import cache_folder, check_hub, check_revision, find_snapshot

COMMIT = "0123456789" * 4


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({"HF_HUB_CACHE": "/a", "HF_HOME": "/b"}, "/a"),
        ({"HF_HOME": "/b", "XDG_CACHE_HOME": "/c"}, "/b/hub"),
        ({"XDG_CACHE_HOME": "/c"}, "/c/huggingface/hub"),
        ({"HF_HUB_CACHE": "~/a", "HF_HOME": ""}, "~/a"),
        ({}, "~/.cache/huggingface/hub"),
    ],
)
def test_the_cache_is_where_the_hubs_tools_keep_it(environ: dict[str, str], expected: str):
    """A user who downloaded with the hub's tools does not have to name the folder."""
    assert cache_folder(environ) == Path(expected).expanduser()


@pytest.mark.parametrize("name", ["bert", "org/tiny", "org/all-MiniLM_L6.v2", "a" * 96 + "/" + "b" * 96])
def test_names_of_repositories_are_accepted(name: str):
    """A repository has a name, with or without an organisation."""
    check_hub(name)


@pytest.mark.parametrize(
    "name", ["", "org/", "/tiny", "org/a/b", "../tiny", "org/..", "org--x/tiny", "org/tiny\n", "a" * 97, "org\\tiny"]
)
def test_other_names_are_refused(name: str):
    """A name that leads to another folder of the cache, or out of it, is refused."""
    with pytest.raises(ValueError, match="expected organisation/name"):
        check_hub(name)


@pytest.mark.parametrize("revision", [None, "", "main", "v1.0", COMMIT[:12], COMMIT + "0", COMMIT + "\n", "A" * 40])
def test_only_commits_are_revisions(revision: str | None):
    """A branch or a tag can move to other files (AR-078)."""
    check_revision(COMMIT)
    with pytest.raises(ValueError, match="expected a commit of 40 hex digits"):
        check_revision(revision)


def test_a_snapshot_is_found_by_repository_and_commit(tmp_path: Path):
    """The folder of the commit holds the files; the folder of the repository holds the targets of their links."""
    repository = tmp_path / "models--org--tiny"
    (repository / "snapshots" / COMMIT).mkdir(parents=True)
    assert find_snapshot("org/tiny", COMMIT, tmp_path) == (repository / "snapshots" / COMMIT, repository)


def test_a_missing_snapshot_names_the_command_to_download_it(tmp_path: Path):
    """The error has the repository and the commit, and no path of this machine."""
    with pytest.raises(ConfigurationError, match=f"hf download org/tiny --revision {COMMIT}") as refused:
        find_snapshot("org/tiny", COMMIT, tmp_path)
    assert str(tmp_path) not in str(refused.value)
