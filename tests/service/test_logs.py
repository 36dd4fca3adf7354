"""Logs of dry runs on the server: no text from a worker becomes a path."""

import pytest
from redline.base.errors import UsageError
from redline.service.logs import MOST_AT_ONCE, folder_of, read_log, write_log

SEARCH = "0123456789ab"


def test_a_log_is_written_in_parts_and_read_from_anywhere(tmp_path):
    assert read_log(tmp_path, SEARCH, "3.log") == (b"", 0)
    assert write_log(tmp_path, SEARCH, "3.log", 0, b"one ") == 4
    assert write_log(tmp_path, SEARCH, "3.log", 4, b"two") == 7
    assert write_log(tmp_path, SEARCH, "3.log", 4, b"two") == 7, "a part that is told again is the same"
    assert read_log(tmp_path, SEARCH, "3.log", 4) == (b"two", 7)
    assert read_log(tmp_path, SEARCH, "3.log", 1, 3) == (b"ne ", 7)
    assert read_log(tmp_path, SEARCH, "3.log", 100) == (b"", 7)


def test_a_repeated_dry_run_restarts_its_log(tmp_path):
    write_log(tmp_path, SEARCH, "3.log", 0, b"of the first worker")
    assert write_log(tmp_path, SEARCH, "3.log", 0, b"second") == 6
    assert read_log(tmp_path, SEARCH, "3.log") == (b"second", 6)


@pytest.mark.parametrize("search", ["..", "0123456789a", "0123456789AB", "0123456789ab/..", "/etc", "0123456789ab\n"])
def test_invalid_search_ids_are_no_folders(tmp_path, search):
    with pytest.raises(UsageError, match="12 hexadecimal digits"):
        folder_of(tmp_path, search)


@pytest.mark.parametrize("name", ["../3.log", "3", "3.log/", "/etc/passwd", "3.log\0", "a.log", ".log"])
def test_invalid_log_names_are_refused(tmp_path, name):
    for call in (lambda: write_log(tmp_path, SEARCH, name, 0, b""), lambda: read_log(tmp_path, SEARCH, name)):
        with pytest.raises(UsageError, match="a log's name is like 7.log"):
            call()


def test_a_gap_and_a_part_too_long_are_refused(tmp_path):
    with pytest.raises(UsageError, match="begin there, but got offset 5"):
        write_log(tmp_path, SEARCH, "3.log", 5, b"x")
    with pytest.raises(UsageError, match=f"at most {MOST_AT_ONCE} bytes"):
        write_log(tmp_path, SEARCH, "3.log", 0, b"x" * (MOST_AT_ONCE + 1))


def test_a_link_is_not_followed(tmp_path):
    logs = tmp_path / "searches" / SEARCH / "logs"
    logs.mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    (logs / "3.log").symlink_to(tmp_path / "secret")
    with pytest.raises(OSError):
        write_log(tmp_path, SEARCH, "3.log", 0, b"x")
    with pytest.raises(OSError):
        read_log(tmp_path, SEARCH, "3.log")
    assert (tmp_path / "secret").read_text() == "secret"
