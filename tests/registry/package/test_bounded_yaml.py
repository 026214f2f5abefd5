"""bounded_yaml: documents of model.yaml and of settings whose cost is bounded by their size."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.registry.package.bounded_yaml import MAX_DOCUMENT_BYTES, BadDocument, read_document, read_yaml


def test_plain_data_is_read():
    """Mappings, lists, text, numbers and aliases are what YAML says."""
    document = b"shared: &edges [1, 2]\nbuckets: *edges\nname: x\nratio: 0.5\nnone:\n"
    assert read_yaml(document) == {"shared": [1, 2], "buckets": [1, 2], "name": "x", "ratio": 0.5, "none": None}
    assert read_yaml(b"") is None


@pytest.mark.parametrize("text", [b"a: [", b"a: b: c", b"a: !!python/name:os.system ''", b"\xff", b"a: 2026-13-45"])
def test_bytes_that_are_no_yaml_are_refused(text: bytes):
    """Broken syntax, tags of objects, bytes that are not text and impossible dates raise one line."""
    with pytest.raises(BadDocument, match="not valid YAML") as refused:
        read_yaml(text)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    "value",
    ["!!bool x", "!!int ''", "!!int -_", "!!float _", "!!timestamp x", "!!binary é", "!!int {a: 1}", "!!set [a]"],
)
def test_a_value_that_does_not_fit_its_tag_is_refused(value: str):
    """The parser has an error of its own kind for each of them."""
    with pytest.raises(BadDocument, match="not valid YAML"):
        read_yaml(f"a: {value}".encode())


def test_an_error_names_its_line():
    """The message continues a line that begins with the file's name."""
    with pytest.raises(BadDocument, match=r"^, line 3: not valid YAML$"):
        read_yaml(b"a: 1\nb: 2\nc: ]\n")
    with pytest.raises(BadDocument, match=r"^, line 3: found a twice, expected distinct names$"):
        read_yaml(b"a: 1\nb: 2\na: 3\n")


def test_a_name_in_two_mappings_is_no_repetition():
    """Names are distinct within their mapping; text and a number are different names."""
    assert read_yaml(b"a: {x: 1}\nb: {x: 2}\n1: c\n'1': d\n") == {"a": {"x": 1}, "b": {"x": 2}, 1: "c", "1": "d"}


def test_a_document_has_a_largest_size():
    """A document of 64 KiB is read, and one byte more is refused."""
    longest = b"a: " + b"x" * (MAX_DOCUMENT_BYTES - 3)
    assert len(read_yaml(longest)["a"]) == MAX_DOCUMENT_BYTES - 3
    with pytest.raises(BadDocument, match="found 65537 bytes, expected at most 65536"):
        read_yaml(longest + b"x")


@pytest.mark.parametrize(("opening", "closing"), [(b"[", b"]"), (b"{a: ", b"}")])
def test_depth_is_bounded(opening: bytes, closing: bytes):
    """Thirty levels are read; thousands are refused before the parser recurses into them."""
    read_yaml(opening * 30 + b"1" + closing * 30)
    with pytest.raises(BadDocument, match="nested deeper than 32 levels"):
        read_yaml(opening * 5000 + b"1" + closing * 5000)


def test_aliases_are_counted_with_their_contents():
    """A few hundred bytes that stand for a billion values are refused."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    with pytest.raises(BadDocument, match="more than 20000 values or 32 levels with aliases"):
        read_yaml("\n".join(lines).encode())


def test_an_alias_inside_of_itself_is_refused():
    """A document without an end is not followed."""
    with pytest.raises(BadDocument, match="found an alias inside of what it names"):
        read_yaml(b"a: &a [*a]")


def test_a_number_has_a_largest_length():
    """A number of a thousand digits is read; more digits cost quadratic time and are refused."""
    assert read_yaml(b"a: " + b"9" * 1000) == {"a": 10**1000 - 1}
    with pytest.raises(BadDocument, match="found a number of 1001 digits"):
        read_yaml(b"a: " + b"9" * 1001)


def test_only_regular_files_are_read(tmp_path: Path):
    """A FIFO is refused at once, and of a large file only one byte more than the limit is read."""
    fifo, large = tmp_path / "fifo", tmp_path / "large"
    os.mkfifo(fifo)
    large.write_bytes(b"x" * (MAX_DOCUMENT_BYTES + 1000))
    with pytest.raises(BadDocument, match="found no regular file"):
        read_document(fifo)
    assert len(read_document(large)) == MAX_DOCUMENT_BYTES + 1
