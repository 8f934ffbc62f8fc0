"""What tells a file's bytes from others, read as a whole or in samples."""

from pathlib import Path

from puzzle_align.files.checksums import Region, digest_of

LENGTH = 2**17


def test_a_digest_is_of_names_and_bytes_wherever_they_lie(tmp_path: Path) -> None:
    data = bytes(range(256)) * (LENGTH // 256)
    (tmp_path / "one").write_bytes(data)
    (tmp_path / "other").write_bytes(b"before" + data + b"after")

    def found(name: str, file: str, start: int, *, whole: bool, length: int = LENGTH) -> bytes:
        return digest_of([Region(name, tmp_path / file, start, length)], whole=whole)

    for whole in (False, True):
        one = found("a", "one", 0, whole=whole)
        assert one == found("a", "other", 6, whole=whole)
        assert one != found("b", "one", 0, whole=whole)
        assert one != found("a", "one", 0, whole=whole, length=LENGTH - 1)
        assert one != found("a", "other", 0, whole=whole)
        for at in (0, LENGTH - 1):
            changed = bytearray(data)
            changed[at] ^= 1
            (tmp_path / "changed").write_bytes(changed)
            assert one != found("a", "changed", 0, whole=whole)
    # Samples do not see all.
    changed = bytearray(data)
    changed[5000] ^= 1
    (tmp_path / "changed").write_bytes(changed)
    for whole in (False, True):
        one, other = (found("a", file, 0, whole=whole) for file in ("one", "changed"))
        assert (one != other) == whole
