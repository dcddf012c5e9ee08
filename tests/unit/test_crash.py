"""Failures that nobody foresaw, and answers of the operating system: one line, and an exit code."""

import errno
import gzip
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import envbuild
from envbuild.base.atomic import replacing
from envbuild.base.errors import BuildError, EnvbuildError, HostError, UsageError
from envbuild.base.system_errors import file_error, system_error
from envbuild.verify.image_file import image_kind

TOKEN = "x1Y2" * 10


def fail(statement: str, *before: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Run a command that does `statement`."""
    lines = [
        "import sys",
        "from envbuild.cli import commands, main",
        *before,
        f"def run(**_):\n    {statement}",
        "commands.cli.main = run",
        f"sys.argv = ['envbuild', 'job', '--hf-token', 'a-secret-word', 'AUTH=Bearer {TOKEN}']",
        "main()",
    ]
    return subprocess.run(
        [sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True, env={**os.environ, **env}
    )


def test_an_unforeseen_failure_is_one_line_with_the_path_of_a_report(tmp_path: Path) -> None:
    done = fail(
        "raise KeyError('https://me:pass/word@host', 'of-the-environment')",
        TMPDIR=str(tmp_path),
        MY_TOKEN="of-the-environment",
        HARMLESS="not in any report",
    )
    assert done.returncode == 70 and done.stdout == ""
    (report,) = tmp_path.iterdir()
    assert done.stderr == f"error: KeyError, a fault of envbuild itself; please report it with the file {report}\n"
    text = report.read_text()
    assert text.startswith(f"envbuild {envbuild.__version__}, Python ") and "Traceback (most recent call last)" in text
    assert "command: envbuild job --hf-token **** AUTH=****" in text and "https://me:****@host" in text
    assert not [word for word in ("a-secret", TOKEN, "pass/word", "of-the-env", "not in any") if word in text]
    assert report.stat().st_mode & 0o077 == 0


def test_a_report_that_cannot_be_written_goes_to_stderr_without_secrets() -> None:
    done = fail("raise KeyError('https://me:pw@host')", "import tempfile; tempfile.tempdir = '/nonexistent'")
    assert done.returncode == 70 and "Traceback (most recent call last)" in done.stderr
    assert "https://me:****@host" in done.stderr and "a-secret-word" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("error: KeyError, a fault of envbuild; the report above could not")


def test_a_panic_of_an_extension_module_is_reported_too(tmp_path: Path) -> None:
    done = fail("raise Panic('index out of bounds')", "class Panic(BaseException): pass", TMPDIR=str(tmp_path))
    assert done.returncode == 70 and "index out of bounds" in next(tmp_path.iterdir()).read_text()


@pytest.mark.parametrize("module", ["click", "envbuild.contract.kinds", "rich.console"])
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_while_modules_are_imported_interrupts(module: str, name: str) -> None:
    script = f"""if True:
        import signal, sys
        class Finder:
            def find_spec(self, name, *_):
                if name == {module!r}:
                    signal.raise_signal(signal.{name})
        sys.meta_path.insert(0, Finder())
        sys.argv = ["envbuild", "doctor"]
        from envbuild.cli import main
        main()
    """
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert (done.returncode, done.stderr.strip()) == (130, "envbuild: interrupted")  # click ends the line of ^C


NUMBERS = [  # of Lustre, NFS, FUSE, damaged and odd file systems, too
    (errno.ENOSPC, BuildError),
    (errno.EDQUOT, BuildError),
    (errno.EIO, BuildError),
    (errno.EINTR, BuildError),
    (errno.EROFS, HostError),
    (errno.EACCES, HostError),
    (errno.EMFILE, HostError),
    (errno.ENAMETOOLONG, UsageError),
    *(
        (number, BuildError)
        for number in (
            errno.ESHUTDOWN,
            errno.ENOTCONN,
            errno.EUCLEAN,
            errno.ENOTSUP,
            errno.EBUSY,
            errno.ETIMEDOUT,
            errno.ESTALE,
            errno.ENOLCK,
            errno.EREMOTEIO,
            errno.ENODEV,
            errno.EPIPE,
        )
    ),
]


@pytest.mark.parametrize(("number", "kind"), NUMBERS)
def test_an_answer_of_the_system_names_the_path_and_a_way_out(number: int, kind: type[EnvbuildError]) -> None:
    found = system_error(OSError(number, os.strerror(number), "/store/blobs/x"))
    assert type(found) is kind and found.hint
    assert re.fullmatch(f"cannot (read or )?write /store/blobs/x: {os.strerror(number)}", found.message)


def test_every_answer_about_a_file_is_a_message() -> None:
    for number in errno.errorcode:
        found = system_error(OSError(number, os.strerror(number), "/store/x"))
        assert found is not None and found.exit_code in (2, 4, 6) and "/store/x" in found.message and found.hint


def test_errors_that_only_a_fault_of_envbuild_explains_are_not_the_users() -> None:
    assert system_error(OSError(errno.EBADF, "Bad file descriptor")) is None
    assert system_error(OSError("no answer of the system")) is None
    assert system_error(UnicodeEncodeError("idna", "x", 0, 1, "label too long")) is None


def _read(path: Path) -> None:
    with path.open("rb") as stream:
        os.pread(stream.fileno(), 1, 0)
        raise OSError(errno.ENOTCONN, os.strerror(errno.ENOTCONN))


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as one, target.open("wb") as other:
        os.sendfile(other.fileno(), one.fileno(), 0, 1)
        raise OSError(errno.EIO, os.strerror(errno.EIO))


def _full(path: Path) -> None:
    with replacing(path) as temporary, temporary.open("w") as stream, open("/dev/full", "w") as full:
        stream.write("x")
        os.dup2(full.fileno(), stream.fileno())


def _rename(path: Path) -> None:
    with replacing(path):
        path.mkdir()


@pytest.mark.parametrize(
    ("act", "told"),
    [
        (lambda path: (path / "gone").read_bytes(), "read {}/gone: No such file"),
        (lambda path: path.write_text("x"), "write {}: Is a directory"),
        (lambda path: gzip.open(path), "read {}: Is a directory"),  # noqa: SIM115
        (lambda path: os.mkdir(path), "read or write {}: File exists"),
        (lambda path: _read(path / "x"), "read {}/x: Transport endpoint"),
        (lambda path: Path("/proc/self/mem").read_bytes(), "read /proc/self/mem: Input/output error"),
        (lambda path: _copy(path / "x", path / "y"), "copy {0}/x to {0}/y: Input/output error"),
        (lambda path: _full(path / "z"), "write {}/z: No space left"),
        (lambda path: _rename(path / "z"), "write {}/z: Is a directory"),
    ],
)
def test_a_message_names_the_file_and_whether_it_was_read_or_written(
    tmp_path: Path, act: Callable[[Path], object], told: str
) -> None:
    """read(2), write(2) and fsync(2) give no name."""
    (tmp_path / "x").write_text("x")
    with pytest.raises(OSError, match=r".") as raised:
        act(tmp_path)
    found = system_error(raised.value)
    assert found is not None and f"cannot {told.format(tmp_path)}" in found.message
    assert "cannot write /out: " in file_error(OSError(errno.EIO, "Input/output error"), "/out")


def test_an_image_that_the_disk_does_not_return_is_not_another_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`out/i.sif is not an artifact of envbuild`, exit code 2, was the answer to EIO."""

    def fail(path: Path, mode: str) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))

    (tmp_path / "i.sif").write_text("")
    assert image_kind(tmp_path / "i.sif") is None and image_kind(tmp_path / "gone") is None
    monkeypatch.setattr(Path, "open", fail)
    with pytest.raises(OSError, match="Input/output error"):
        image_kind(tmp_path / "i.sif")


def test_a_tree_that_cannot_be_copied_names_its_first_file(tmp_path: Path) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "from/x").symlink_to("gone")
    with pytest.raises(shutil.Error) as failed:
        shutil.copytree(tmp_path / "from", tmp_path / "to")
    tree = system_error(failed.value)
    assert (
        tree is not None and f"cannot copy {tmp_path}/from/x to {tmp_path}/to/x: [Errno 2] No such file" in tree.message
    )


def command(*arguments: str | Path, stdout: int = subprocess.PIPE, **env: str) -> subprocess.CompletedProcess[str]:
    """Run envbuild in at most 2 GB of memory."""
    return subprocess.run(
        [sys.executable, "-m", "envbuild", *map(str, arguments)],
        stdout=stdout,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **env},
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (2 << 30, 2 << 30)),
    )


def test_a_blob_that_the_disk_does_not_return_is_one_clear_message() -> None:
    done = fail("open('/proc/self/mem', 'rb').read(1)")
    assert done.returncode == 4 and "Input/output error" in done.stderr and "Traceback" not in done.stderr


def test_no_folder_for_temporary_files_is_one_clear_message() -> None:
    done = fail("tempfile.gettempdir()", "import tempfile; tempfile._candidate_tempdir_list = lambda: ['/nonexistent']")
    assert done.returncode == 6 and "no folder for temporary files" in done.stderr and "TMPDIR" in done.stderr


def test_a_current_folder_that_was_removed_is_one_clear_message(tmp_path: Path) -> None:
    line = f"cd {tmp_path} && rmdir {tmp_path} && {sys.executable} -m envbuild list"
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(["sh", "-c", line], capture_output=True, text=True, env=env)
    assert done.returncode == 2 and "the current folder does not exist any more" in done.stderr


def test_a_full_standard_output_is_one_clear_message() -> None:
    with open("/dev/full", "w") as full:
        done = command("list", stdout=full.fileno())
    assert done.returncode == 4 and "Traceback" not in done.stderr
    assert "cannot write standard output: No space left on device" in done.stderr


@pytest.mark.parametrize("number", [errno.EPIPE, errno.ESHUTDOWN])
def test_a_broken_pipe_of_anything_but_the_own_streams_is_an_error(tmp_path: Path, number: int) -> None:
    """click ends silently with 1 after any EPIPE. A Lustre client that was evicted reports ESHUTDOWN."""
    statement = f"raise OSError({number}, 'gone', '/lustre/x')"
    lines = [
        "import sys, click",
        "from envbuild.cli import commands, main",
        "import envbuild.cli.recipes as recipes",
        f"def fail(**_):\n    {statement}",
        "recipes.list_command.callback = fail",
        "sys.argv = ['envbuild', 'list']",
        "main()",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert done.returncode == 4 and "cannot read or write /lustre/x: gone" in done.stderr, done.stderr


@pytest.mark.parametrize("arguments", ["list", "show pt_cpu", "matrix", "doctor --json", "completion bash", "--help"])
def test_a_reader_that_stops_ends_the_command_as_it_ends_other_tools(arguments: str) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    done = command(*arguments.split(), stdout=theirs)
    os.close(theirs)
    assert done.returncode == -signal.SIGPIPE
    assert not re.search("Traceback|Exception|error:|EPIPE|Broken", done.stderr), done.stderr


def test_a_reader_of_messages_that_stops_ends_the_command_too() -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    done = subprocess.run([sys.executable, "-m", "envbuild", "show", "nowhere"], stderr=theirs)
    os.close(theirs)
    assert done.returncode == -signal.SIGPIPE


@pytest.mark.parametrize(("arguments", "code"), [("lock pt_minimal --check", 0), ("show nowhere", 2), ("shwo", 2)])
def test_messages_that_nobody_can_keep_decide_no_exit_code(arguments: str, code: int) -> None:
    """Exit code 1 would say of `envbuild diff` that the artifacts differ."""
    with open("/dev/full", "w") as full:
        done = subprocess.run([sys.executable, "-m", "envbuild", *arguments.split()], stderr=full)
    assert done.returncode == code


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_standard_streams_are_no_fault(closed: str) -> None:
    for arguments in ("show pt_cpu", "matrix pt_minimal --artifact venv"):
        line = f"{sys.executable} -m envbuild {arguments} {closed}"
        done = subprocess.run(["sh", "-c", line], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, ""), arguments


@pytest.mark.parametrize("out", ["/tmp/" + "a" * 300, "/tmp/" + "a/" * 2500 + "x"])
def test_a_path_that_is_too_long_is_one_short_message(out: str) -> None:
    done = command("venv", "pt_cpu", "--locked", "--dry-run", "--out", out)
    assert done.returncode == 2 and "File name too long" in done.stderr and "choose a shorter path" in done.stderr
    assert len(done.stderr) < 1000


@pytest.mark.parametrize("variable", ["ENVBUILD_SITE", "PIP_CONFIG_FILE"])
def test_a_settings_file_without_an_end_is_refused(variable: str) -> None:
    done = command("list", **{variable: "/dev/zero"})
    assert done.returncode == 2 and "/dev/zero: cannot be read" in done.stderr and "too large" in done.stderr
