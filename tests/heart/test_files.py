"""Files are written whole or not at all, and a folder that cannot be written is refused before the work starts."""

import os

import pytest

from fa2_lab.tools import command, files


def test_write_is_atomic(tmp_path, monkeypatch):
    path = files.write(tmp_path / "x.json", "old\n")
    assert files.write(path, b"new\n") == path and path.read_bytes() == b"new\n"

    def full(*names):
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(KeyboardInterrupt):
        files.write(path, "newer\n")
    assert path.read_text() == "new\n" and [file.name for file in tmp_path.iterdir()] == ["x.json"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that begin as copies of this one")
def test_concurrent_writes_leave_one_whole_file(tmp_path, monkeypatch):
    path, replace = tmp_path / "x.json", os.replace

    def after_another(*names):
        """Let another process write its whole file between this file's writing and its renaming."""
        monkeypatch.setattr(os, "replace", replace)
        child = os.fork()
        if not child:
            files.write(path, "theirs")
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert path.read_text() == "theirs"
        replace(*names)

    monkeypatch.setattr(os, "replace", after_another)
    assert files.write(path, "mine and longer").read_text() == "mine and longer"
    assert [file.name for file in tmp_path.iterdir()] == ["x.json"]


def test_write_uses_unix_line_endings(tmp_path):
    assert files.write(tmp_path / "x", "τ\n").read_bytes() == "τ\n".encode()


def test_check_writable_rejects_unwritable_folders(tmp_path, monkeypatch):
    files.check_writable(tmp_path / "new", "bench")
    assert list((tmp_path / "new").iterdir()) == []
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"^bench: cannot write into .*file.* \(.+\); nothing was done$"):
        files.check_writable(tmp_path / "file" / "data", "bench")
    monkeypatch.setattr(os, "replace", lambda *names: os.stat(tmp_path / "nothing"))
    with pytest.raises(ValueError, match=r"^bench: cannot write into .*new"):
        files.check_writable(tmp_path / "new", "bench")


@pytest.mark.parametrize("arguments", [["bench", "smoke"], ["figures", "waves"], ["book", "02"]], ids=" ".join)
def test_commands_reject_an_unwritable_folder_before_work(arguments, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    assert command.main([*arguments, "--folder", str(tmp_path / "file" / "x")]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith(f"fa2-lab: {arguments[0]}: cannot write into ")
