"""Archives of studies: they report what the study reports, and what is not intact is refused."""

import gzip
import hashlib
import io
import json
import os
import random
import shutil
import tarfile
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from bench import archive
from bench.archive import open_archive, write_archive
from bench.commands.completion import complete_study
from bench.study.layout import StudyFolder
from ddp_scaling_bench.errors import BenchError
from tests.analysis.figures import no_figure
from tests.analysis.studies import StudyBuilder, Timing, make_cell, strong, weak
from tests.commands.command_line import bench, is_reported, refusal
from tests.common import NOBODY, in_fork, raised
from tests.freeze.compare import unpack

#: Studies of the freeze with failed, requeued and preempted runs, packs, patterns and several strategies.
FROZEN = ("failed", "pack", "patterns", "preempted", "requeued", "strategies")


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Return the archive of a study with two runs; it is unpacked in ``tmp_path/temporary``."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    study = StudyBuilder(tmp_path / "results/small", strong(sizes=(1, 2)), repeats=1, epochs=1).write()
    write_archive(StudyFolder(study), path := tmp_path / "small.tar.gz")
    return path


def contents(folder):
    """Return the content of each file below a folder by its path."""
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def members_of(path):
    """Return the members of an archive and their contents."""
    with tarfile.open(path) as packed:
        return [(one, packed.extractfile(one).read()) for one in packed.getmembers()]


def write_members(path, members):
    """Write members and their contents as an archive."""
    with tarfile.open(path, "w:gz", format=tarfile.PAX_FORMAT) as packed:
        for member, content in members:
            packed.addfile(member, io.BytesIO(content))


def with_member(path, name, content=b"", listed=True, **values):
    """Add a member to an archive, and to its manifest if it is ``listed``; ``values`` are those of its header."""
    (head, text), *others = members_of(path)
    manifest = json.loads(text)
    if listed:
        manifest["files"][name.removeprefix("small/")] = hashlib.sha256(content).hexdigest()
    text = json.dumps(manifest).encode()
    member = tarfile.TarInfo(name)
    member.size, head.size = len(content), len(text)
    for key, value in values.items():
        setattr(member, key, value)
    write_members(path, [(head, text), *others, (member, content)])


def test_archives_give_the_same_tables_in_another_folder_and_for_another_user(tmp_path):
    from analysis.data.load import load_study
    from analysis.report.results import Results
    from analysis.report.tables import csv_table

    studies, moved = tmp_path / "studies", Path(tempfile.mkdtemp())
    for name in FROZEN:
        unpack(name, studies)
    made = 30 - len(FROZEN)
    for seed in range(made):
        cells = [strong, weak][seed % 2](sizes=(1, 2, 4)[: 2 + seed % 2])
        swept = {"precision": "bf16", "env.NCCL_ALGO": "Ring, Tree"}
        cells += [make_cell(2, batch=64, swept=swept)][: seed % 3]

        def state(cell, repeat, seed=seed):
            failed = ("failed", f"it was killed in {tmp_path}", "out-of-memory")
            return failed if (seed + repeat) % 5 == 0 and cell.nodes == 2 else None

        timing = Timing(comm_s=1e-3 * (1 + seed))
        options = {"seed": seed, "timing": timing, "state": state, "repeats": 2}
        StudyBuilder(studies / f"made {seed} ü", cells, **options).write()
    expected = {}
    try:
        for path in studies.iterdir():
            write_archive(StudyFolder(path), moved / f"{path.name}.tar.gz")
            expected[path.name] = csv_table(Results.of(load_study(path)).rows)
        for path in (moved, *moved.iterdir()):
            path.chmod(0o755)
        shutil.rmtree(studies)

        def tables():
            """Return the scaling table of each archive, in another process, folder and user."""
            os.chdir("/")
            opened = {path: open_archive(path).path for path in moved.glob("*.tar.gz")}
            name_of = {path: path.name.removesuffix(".tar.gz") for path in opened}
            return {
                name_of[path]: csv_table(Results.of(load_study(own)).rows) for path, own in opened.items()
            }

        found = in_fork(tables, user=NOBODY)
    finally:
        shutil.rmtree(moved)
    assert len(expected) == 30
    assert found == expected


def test_a_change_of_a_byte_in_a_file_is_found(small, tmp_path):
    draw, members = random.Random(1), members_of(small)
    filled = [place for place, (_, content) in enumerate(members) if content]
    for _ in range(40):
        place = draw.choice(filled)
        changed = bytearray(members[place][1])
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        own = [(one, bytes(changed) if here == place else old) for here, (one, old) in enumerate(members)]
        write_members(small, own)
        assert "is not an intact archive: " in raised(BenchError, open_archive, small), members[place][0].name


def test_a_change_of_a_byte_of_the_archive_is_found_or_changes_no_file(small, tmp_path):
    intact, draw, refused = small.read_bytes(), random.Random(2), 0
    expected = contents(open_archive(small).path)
    for _ in range(50):
        changed = bytearray(intact)
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
        small.write_bytes(changed)
        try:
            found = contents(open_archive(small).path)
        except BenchError:
            refused += 1
        else:
            assert found == expected
    assert refused > 45  # the others changed the time in gzip's header
    for end in (0, 5, len(intact) // 2, len(intact) - 1):
        small.write_bytes(intact[:end])
        assert "is not an intact archive" in raised(BenchError, open_archive, small)


SPARSE = {"pax_headers": {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": "9"}}
HOSTILE = {
    "absolute": {"name": "/{outside}/evil"},
    "absolute, in the manifest only": {"name": "small//{outside}/evil"},
    "above": {"name": "small/runs/../../../outside/evil"},
    "not canonical": {"name": "small/runs/./evil"},
    "not a part of a study": {"name": "small/report/index.html"},
    "deep": {"name": "small/runs/" + "a/" * 1500 + "evil"},
    "symlink": {"name": "small/runs/evil", "type": tarfile.SYMTYPE, "linkname": "{outside}"},
    "hard link": {"name": "small/runs/evil", "type": tarfile.LNKTYPE, "linkname": "small/plan.json"},
    "device": {"name": "small/runs/evil", "type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 5},
    "fifo": {"name": "small/runs/evil", "type": tarfile.FIFOTYPE},
    "folder": {"name": "small/runs/evil", "type": tarfile.DIRTYPE},
    "zeros": {"name": "small/runs/evil", "content": bytes(9 << 20)},
    "repeated": {"name": "small/plan.json", "content": b"{}"},
    "sparse": {"name": "small/runs/evil", "content": b"1\n0\n9\n" + bytes(512), **SPARSE},
    "old sparse": {"name": "small/runs/evil", "type": tarfile.GNUTYPE_SPARSE},
    "huge header": {"name": "small/runs/evil", "pax_headers": {"comment": "a" * (2 << 20)}},
    "size in a header": {"name": "small/runs/evil", "pax_headers": {"size": "99999999999"}},
    "not in the manifest": {"name": "small/runs/evil", "content": b"evil", "listed": False},
    "of another study": {"name": "other/runs/evil", "content": b"evil"},
    "a file as a folder": {"name": "small/plan.json/evil", "content": b"evil"},
}


@pytest.mark.parametrize("attack", HOSTILE)
def test_a_hostile_archive_is_refused_and_nothing_is_written_outside(attack, small, tmp_path, monkeypatch):
    monkeypatch.setattr(archive, "_BYTES", 8 << 20)
    (outside := tmp_path / "outside").mkdir()
    values = HOSTILE[attack]
    values = {
        key: one.format(outside=outside) if isinstance(one, str) else one for key, one in values.items()
    }
    with_member(small, **values)
    before = contents(tmp_path)
    message = raised(BenchError, open_archive, small)
    assert message.startswith(str(small)) or attack == "a file as a folder"
    assert len(message) - len(str(small)) < 200
    kept = {
        name: content for name, content in contents(tmp_path).items() if not name.startswith("temporary/")
    }
    assert kept == before
    assert not [
        path for path in tmp_path.rglob("*") if path.is_symlink() or not (path.is_file() or path.is_dir())
    ]


def test_sizes_and_headers_that_no_program_writes_are_refused(small):
    def with_sum(header):
        total = sum(header[:148]) + 256 + sum(header[156:])
        return header[:148] + b"%06o\0 " % total + header[156:]

    negative = b"\xff" * 8 + (-512 & 0xFFFFFFFF).to_bytes(4)
    plain = gzip.decompress(small.read_bytes()).rstrip(b"\0")
    plain += bytes(-len(plain) % 512)
    start = tarfile.TarInfo("small/runs/evil").tobuf()[:124]
    for size in (negative, b"\x80" + b"\xff" * 11):
        tail = with_sum(start + size + bytes(512 - 136))
        small.write_bytes(gzip.compress(plain + tail + bytes(1024)))
        assert "is not an intact archive" in raised(BenchError, open_archive, small)


def test_a_manifest_that_is_none_is_refused(small):
    (head, _), *others = members_of(small)
    for text in ("", "[]", "[" * 100_000, '{"study": "..", "version": 1, "files": {}}'):
        head.size = len(text)
        write_members(small, [(head, text.encode()), *others])
        assert "MANIFEST.json" in raised(BenchError, open_archive, small)


def test_commands_that_read_accept_an_archive_and_the_others_refuse_it(small, tmp_path):
    at = {"cwd": tmp_path, "BENCH_RESULTS": str(tmp_path / "results"), "BENCH_SITE": ""}
    done = bench("archive", "small", **at)
    assert (done.returncode, done.stdout) == (0, f"{tmp_path}/results/small.tar.gz\n")
    assert (tmp_path / "results/small.tar.gz").read_bytes() == small.read_bytes()
    manifest = hashlib.sha256(members_of(small)[0][1]).hexdigest()
    assert f"SHA-256 of the manifest: {manifest}" in done.stderr
    for words in (["verify"], ["status"], ["doctor"], ["advise", "--samples", "1M"]):
        own = {study: bench(*words, study, "--json", **at) for study in ("small", "./small.tar.gz")}
        first, second = (done.stdout.replace(str(tmp_path), "") for done in own.values())
        assert (first and json.loads(first).keys()) == (second and json.loads(second).keys())
    done = bench("compare", "small", "small.tar.gz", "--json", **at)
    assert json.loads(done.stdout)["a"] != json.loads(done.stdout)["b"]
    with no_figure():
        for study in ("small", "small.tar.gz", "small.tar.gz"):
            assert is_reported(bench("report", study, **at))
    reports = [contents(tmp_path / name) for name in ("results/small/report", "small-report")]
    assert reports[1].pop("study.json") == b'{"study": "../small.tar.gz"}\n'
    assert reports[0] == reports[1]
    for command in ("submit", "cancel"):
        assert "small.tar.gz: runs of an archive cannot be started" in refusal(command, "small.tar.gz", **at)
    assert "is the archive of a study, not a matrix" in refusal("plan", "small.tar.gz", **at)
    assert "small.tar.gz: exists; give another file" in refusal("archive", "small", **at)
    assert "is already an archive" in refusal("archive", "small.tar.gz", **at)
    typed = SimpleNamespace(params={"results": str(tmp_path / "results")})
    assert complete_study(typed, "sm") == ["small", "small.tar.gz"]
    assert complete_study(typed, f"{tmp_path}/s") == [str(small)]
    # An unpacked archive is a study.
    with tarfile.open(small) as packed:
        packed.extractall(tmp_path / "elsewhere", filter="data")
    at["BENCH_RESULTS"] = str(tmp_path / "elsewhere")
    states = [run["state"] for run in json.loads(bench("status", "small", "--json", **at).stdout)["runs"]]
    assert states == ["completed", "completed"]
    assert contents(tmp_path / "elsewhere/small/runs") == contents(tmp_path / "results/small/runs")


def test_messages_name_the_archive_instead_of_its_temporary_folder(tmp_path):
    unpack("failed", tmp_path)
    study = StudyFolder(next(tmp_path.iterdir()))
    write_archive(study, tmp_path / "a.tar.gz")
    done = bench("doctor", "a.tar.gz", "--json", cwd=tmp_path)
    found = json.loads(done.stdout)
    paths = [one["path"] for one in (*found["causes"], *found["last_lines"])]
    assert {path.split("/")[0] for path in paths} == {"a.tar.gz"}
    study.plan_json.write_text("{")
    write_archive(study, tmp_path / "b.tar.gz")
    assert refusal("status", "b.tar.gz", cwd=tmp_path).startswith("b.tar.gz/plan.json is damaged")


def test_an_archive_has_all_files_but_traces_and_reports(small, tmp_path):
    study = StudyFolder(tmp_path / "results/small")
    run = next(study.runs.glob("*/attempt-1"))
    for name in ("trace-rank0.json.gz", "own/values ü.csv", "a" * 200):
        (run / name).parent.mkdir(exist_ok=True)
        (run / name).write_text(name)
    (study.path / "report").mkdir()
    (study.path / "report/index.html").write_text("page")
    study.pack(1).path.mkdir(parents=True)
    study.pack(1).members.write_text("1")
    study.ledger.chmod(0o600)
    done = bench("archive", cwd=tmp_path, BENCH_RESULTS=str(tmp_path / "results"))
    assert "left out: 1 profiler trace\nwarning: other users cannot read some of these files" in done.stderr
    path = tmp_path / "results/small.tar.gz"
    assert path.stat().st_mode & 0o777 == 0o600
    found, own = contents(open_archive(path).path), contents(study.path)
    assert own.keys() - found.keys() == {
        str((run / "trace-rank0.json.gz").relative_to(study.path)),
        "report/index.html",
    }
    assert all(own[name] == content for name, content in found.items())


def test_a_study_that_cannot_be_archived_as_it_is_is_refused(small, tmp_path, monkeypatch):
    study, path = StudyFolder(tmp_path / "results/small"), tmp_path / "other.tar.gz"
    run = next(study.runs.glob("*/attempt-1"))
    (run / "latest").symlink_to("run.json")
    assert "latest: is a link or no file" in raised(BenchError, write_archive, study, path)
    (run / "latest").unlink()
    os.mkfifo(run / "pipe")
    assert "pipe: is a link or no file" in raised(BenchError, write_archive, study, path)
    (run / "pipe").unlink()
    (odd := Path(os.fsdecode(bytes(run / "odd-") + b"\xff"))).write_text("")
    assert "cannot be archived" in raised(BenchError, write_archive, study, path)
    odd.unlink()
    assert "is no name of an archive" in raised(BenchError, write_archive, study, tmp_path / "other.zip")
    digest_of = archive.digest_of

    def changing(file):
        digest = digest_of(file)
        Path(file).write_bytes(Path(file).read_bytes()[::-1])
        return digest

    with monkeypatch.context() as patch:
        patch.setattr(archive, "digest_of", changing)
        assert "when nothing writes to the study" in raised(BenchError, write_archive, study, path)
    (run / "checkpoint.pt").write_bytes(b"1")
    os.truncate(run / "checkpoint.pt", 3 << 30)
    message = raised(BenchError, write_archive, study, path)
    assert "has 3.0 GiB, more than an archive's 2 GiB; remove files that bench did not write" in message
    assert "checkpoint.pt" in message
    assert [one.name for one in tmp_path.glob("*.tar.gz*")] == ["small.tar.gz"]


def test_runs_that_have_not_ended_are_not_archived(tmp_path):
    def state(cell, repeat):
        return ("running", "", None) if repeat == 2 else None

    StudyBuilder(tmp_path / "results/open", strong(sizes=(1,)), repeats=2, state=state).write()
    message = refusal("archive", "open", cwd=tmp_path, PATH="")
    assert "1 run may still write files; wait for their ends" in message
