"""The trainer's wheel: valid, complete, the same bytes each time."""

import base64
import csv
import hashlib
import io
import zipfile

from packaging.utils import parse_wheel_filename

from envbuild.layers.wheel import Trainer, load_trainer


def test_the_wheel_is_the_same_each_time_and_follows_its_files() -> None:
    one, two = load_trainer(), load_trainer()
    assert one.wheel() == two.wheel() and one.digest == two.digest
    name, content = one.files[0]
    other = Trainer(((name, content + b"\n"), *one.files[1:]))
    assert other.digest != one.digest and other.wheel() != one.wheel()


def test_record_names_every_file_with_its_hash() -> None:
    trainer = load_trainer()
    assert parse_wheel_filename(trainer.file_name)[0] == "ddp-train"
    with zipfile.ZipFile(io.BytesIO(trainer.wheel())) as archive:
        names = archive.namelist()
        record = next(name for name in names if name.endswith("/RECORD"))
        rows = {row[0]: row[1:] for row in csv.reader(io.StringIO(archive.read(record).decode()))}
        assert set(rows) == set(names) and "ddp_train/__main__.py" in names
        for name in names:
            if name == record:
                continue
            digest = base64.urlsafe_b64encode(hashlib.sha256(archive.read(name)).digest())
            assert rows[name] == ["sha256=" + digest.rstrip(b"=").decode(), str(archive.getinfo(name).file_size)]
