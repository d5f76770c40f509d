"""`metal-supervisor models`, as it is typed, on stores as they come to be: whole, cut off, linked, damaged, in use."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pty
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from metal_supervisor.models import inventory
from metal_supervisor.models.model_directory import Contents, ModelDirectory, kept, with_file
from metal_supervisor.spec.record import Verdict
from metal_supervisor.spec.sources import Artifact, canonical, shown
from metal_supervisor.spec.types import ModelFile, Standing
from metal_supervisor.state.directory import StateDir
from metal_supervisor.state.programs import text_of
from tests.support.records import a_record
from tests.support.typed import typed

DAY = 86400.0
MIB = 1 << 20


class Mac:
    """A state directory with a store below it, and our commands for it."""

    def __init__(self, base: Path) -> None:
        self.state = StateDir(base / "state")
        self.state.create()
        self.store = self.state.path / "models"

    def models(self, *words: str, code: int = 0, stdin: str | None = None) -> str:
        """What a command says, both streams; asserts its exit code."""
        done = typed("models", *words, "--state-dir", str(self.state.path), stdin=stdin or "")
        assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
        return done.stdout + done.stderr

    def listed(self) -> dict[str, dict[str, object]]:
        found = json.loads(self.models("ls", "--json"))
        return {each["slot"]: each for each in found["models"]}

    def slot(
        self, source: str, size: int = MIB, idle_s: float = 0.0, whole: bool = True, digest: bool = True
    ) -> ModelDirectory:
        """A model as a fetch leaves it; without `whole` its first half."""
        source = canonical(source)
        slot = ModelDirectory(self.store, Artifact(source).slot)
        slot.prepare()
        contents = Contents(shown(source), "m.gguf", whole=whole)
        data = b"GGUF" + os.urandom(size - 4)
        if whole:
            (slot.path / "m.gguf").write_bytes(data)
            found = kept(slot.path / "m.gguf", hashlib.sha256(data).hexdigest() if digest else "")
            contents = with_file(contents, "m.gguf", found)
            slot.touch()
        else:
            (slot.path / "m.gguf.partial").write_bytes(data[: size // 2])
            journal = {"validator": '"1"', "size_bytes": size, "sha256": ""}
            (slot.path / "m.gguf.partial.json").write_text(json.dumps(journal))
        slot.write(contents)
        at = time.time() - idle_s
        for path in slot.path.iterdir():
            os.utime(path, (at, at))
        return slot

    def uses(self, path: Path | str, name: str = "tiny", argv: tuple[str, ...] = ()) -> None:
        """A service whose engine has this file."""
        verdict = Verdict(Standing.RUN, "Running", "", 0.0)
        record = a_record(name, model="m", verdict=verdict, endpoint=None)
        if argv:
            self.state.spec_path(f"default.{name}").write_text(json.dumps({"argv": list(argv)}))
            record = replace(record, edition="a")
        record = replace(record, files=(str(path),) if path else ())
        self.state.record_path(record.program).write_text(text_of(record))

    def reports(self, source: str, file: ModelFile) -> None:
        """What the controller tells of a Model."""
        body = {"models": {"default/m": {"uid": "u", "generation": 1, "source": source, "file": asdict(file)}}}
        (self.state.path / "controller.json").write_text(json.dumps(body))


@pytest.fixture
def mac(tmp_path: Path) -> Mac:
    return Mac(tmp_path)


HUB = "hf://o/r/m.gguf"


@contextlib.contextmanager
def elsewhere_filled(slot: ModelDirectory) -> Iterator[None]:
    """A slot that another process fills."""
    code = (
        "import sys; from pathlib import Path; from metal_supervisor.models.model_directory import ModelDirectory\n"
        "with ModelDirectory(Path(sys.argv[1]), sys.argv[2]).locked() as ours:\n"
        "    print(ours, flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-c", code, str(slot.store), slot.name]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin and process.stdout and process.stdout.readline() == "True\n"
        try:
            yield
        finally:
            process.stdin.close()


# ── ls ───────────────────────────────────────────────────────────────────────────────────────────


def test_an_empty_store_is_told_with_its_free_space_and_stays_unmade(mac: Mac) -> None:
    said = mac.models("ls")
    assert f"0 MiB in {mac.store}, " in said and said.endswith(" free\n")
    assert not mac.store.exists()


def test_the_table_has_what_there_is_and_who_uses_it(mac: Mac) -> None:
    whole, cut = mac.slot(HUB, 3 * MIB, 3 * 3600), mac.slot("https://h/big.gguf?token=secret", 8 * MIB, whole=False)
    theirs = mac.store / "their-model"
    theirs.mkdir()
    (theirs / "model.gguf").write_bytes(b"GGUF" * (MIB // 4))
    (mac.store / "ollama" / "blobs").mkdir(parents=True)
    (mac.store / "ollama" / "blobs" / "x").write_bytes(bytes(2 * MIB))
    mac.uses(whole.path / "m.gguf")
    lines = mac.models("ls").splitlines()
    assert lines[0].split() == ["SLOT", "SIZE", "LAST", "USE", "USED", "BY", "SOURCE"]
    rows = {line.split()[0]: line for line in lines[1:4]}
    assert rows[whole.name].split()[1:] == ["3", "MiB", "3", "h", "ago", "default/tiny", "hf://o/r@main/m.gguf"]
    assert "4 MiB of 8 MiB" in rows[cut.name] and "https://h/big.gguf" in rows[cut.name]
    assert "1 MiB" in rows["their-model"] and "LLMKube's own agent" in rows["their-model"]
    assert "Ollama's own models, 2 MiB" in lines[4] and lines[5].startswith("8 MiB in ")
    assert "secret" not in "\n".join(lines)
    found = mac.listed()
    assert found[whole.name]["path"] == str(whole.path / "m.gguf") and found[whole.name]["kind"] == "whole"
    assert (found[cut.name]["kind"], found[cut.name]["totalBytes"]) == ("partial", 8 * MIB)


def test_a_file_that_only_the_command_line_names_is_used(mac: Mac) -> None:
    projector = mac.slot("hf://o/r/mmproj.gguf")
    other = mac.slot(HUB)
    mac.uses("", argv=("llama-server", f"--mmproj={projector.path}/m.gguf"))
    found = mac.listed()
    assert (found[projector.name]["usedBy"], found[other.name]["usedBy"]) == (["default/tiny"], [])


def test_a_file_below_a_directory_of_any_name_is_used(tmp_path: Path) -> None:
    mac = Mac(tmp_path / 'Jörg\'s "Mac" \\ 模')
    used, named = mac.slot(HUB), mac.slot("hf://o/r/mmproj.gguf")
    mac.uses(used.path / "m.gguf", argv=("llama-server", f"--mmproj={named.path}/m.gguf"))
    assert [each["usedBy"] for each in mac.listed().values()] == [["default/tiny"]] * 2


def test_names_of_others_move_no_cursor(mac: Mac) -> None:
    slot = mac.slot(HUB)
    contents = slot.read()
    assert contents is not None
    slot.write(replace(contents, source="hf://o/r\x1b[2J\n\u202e"))
    (mac.store / "a\x1b[31m").mkdir()
    (mac.store / "a\x1b[31m" / "m.gguf").write_bytes(b"GGUF")
    said = mac.models("ls") + mac.models("rm", slot.name, code=1) + mac.models("verify")
    assert all(line.isprintable() for line in said.splitlines()) and "\u202e" not in said


def test_a_partial_that_a_model_waits_for_and_one_that_is_being_filled_say_so(mac: Mac) -> None:
    slot = mac.slot(HUB, whole=False)
    mac.reports("https://huggingface.co/o/r/blob/main/m.gguf", ModelFile("Failed", message="503"))
    assert mac.listed()[slot.name]["wantedBy"] == ["Model default/m"]
    with elsewhere_filled(slot):
        assert mac.listed()[slot.name]["beingFetched"] is True
        assert "being fetched" in mac.models("ls")
    assert mac.listed()[slot.name]["beingFetched"] is False


def test_a_link_in_the_store_is_nobodys_model(mac: Mac, tmp_path: Path) -> None:
    mac.slot(HUB)
    (mac.store / ("a" * 16)).symlink_to(tmp_path)
    assert "a" * 16 not in mac.models("ls")
    assert "is no model in" in mac.models("rm", "a" * 16, "--yes", code=4)


# ── verify ───────────────────────────────────────────────────────────────────────────────────────


def test_sound_files_are_ok_and_one_without_a_digest_is_unknown(mac: Mac) -> None:
    good, plain = mac.slot(HUB), mac.slot("https://h/m.gguf", digest=False)
    said = mac.models("verify")
    found = hashlib.sha256((plain.path / "m.gguf").read_bytes()).hexdigest()
    assert f"ok       {good.name}/m.gguf  1 MiB\n" in said
    assert f"unknown  {plain.name}/m.gguf  1 MiB; its server told no digest; its sha256 is {found}" in said
    contents = plain.read()
    assert contents is not None and contents.files["m.gguf"].sha256 == ""


@pytest.mark.parametrize("harm", ["bit", "shorter", "gone", "link"])
def test_damage_is_told_and_is_an_exit_code(mac: Mac, tmp_path: Path, harm: str) -> None:
    slot, other = mac.slot(HUB), mac.slot("https://h/m.gguf")
    path = slot.path / "m.gguf"
    data = bytearray(path.read_bytes())
    if harm == "bit":
        data[MIB // 2] ^= 1
        path.write_bytes(data)
    elif harm == "shorter":
        os.truncate(path, MIB - 1)
    else:
        path.rename(tmp_path / "m.gguf")
        if harm == "link":
            path.symlink_to(tmp_path / "m.gguf")
    why = {"bit": "its sha256 is", "shorter": "it has 1048575 bytes", "gone": "is missing", "link": "no regular file"}
    said = mac.models("verify", code=1)
    assert f"damaged  {slot.name}/m.gguf" in said and why[harm] in said and "1 of 2 files are damaged" in said
    assert mac.models("verify", other.name).startswith("ok")
    assert mac.models("verify", "hf://o/r@main/m.gguf", code=1).startswith("damaged")
    rows, _ = json.JSONDecoder().raw_decode(mac.models("verify", "--json", code=1))  # and a line on stderr
    assert {row["slot"]: row["verdict"] for row in rows} == {slot.name: "damaged", other.name: "ok"}


def test_a_name_that_leads_out_of_the_store_is_not_read(mac: Mac, tmp_path: Path) -> None:
    slot = mac.slot(HUB)
    (tmp_path / "secret").write_text("secret")
    contents = slot.read()
    assert contents is not None
    for name in ("../../../secret", str(tmp_path / "secret")):
        slot.write(replace(contents, files={name: kept(tmp_path / "secret")}))
        assert "no name of a file within the model store" in mac.models("verify", code=1)


# ── rm ───────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    "word",
    ["", "https://huggingface.co/o/r/resolve/main/m.gguf", "https://hf.co/o/r/blob/main/m.gguf", "hf://o/r/m.gguf"],
)
def test_a_model_is_removed_by_slot_or_by_any_spelling_of_its_source(mac: Mac, word: str) -> None:
    slot, other = mac.slot(HUB, 3 * MIB), mac.slot("https://h/m.gguf")
    assert "3 MiB freed" in mac.models("rm", word or slot.name[:6], "--yes")
    assert [each.name for each in mac.store.iterdir()] == [other.name]


def test_what_a_service_uses_stays_unless_it_is_forced(mac: Mac) -> None:
    slot, other = mac.slot(HUB), mac.slot("https://h/m.gguf")
    mac.uses(slot.path / "m.gguf")
    said = mac.models("rm", other.name, slot.name, "--yes", code=1)
    assert "hf://o/r@main/m.gguf is used by default/tiny" in said and "--force" in said
    assert other.path.exists() and slot.path.exists()
    mac.models("rm", slot.name, "--yes", "--force")
    assert not slot.path.exists()


def test_what_is_being_fetched_stays_even_if_it_is_forced(mac: Mac) -> None:
    slot = mac.slot(HUB, whole=False)
    with elsewhere_filled(slot):
        assert "is being fetched" in mac.models("rm", slot.name, "--yes", "--force", code=1)
    assert (slot.path / "m.gguf.partial").exists()
    mac.models("rm", slot.name, "--yes")
    assert not slot.path.exists()


def test_a_fetch_that_begins_while_somebody_is_asked_keeps_what_it_fills(mac: Mac) -> None:
    slot = mac.slot(HUB, whole=False)
    (entry,) = inventory.look(mac.store, mac.state, mac.store / "ollama").entries
    assert not entry.busy
    with elsewhere_filled(slot), pytest.raises(inventory.Busy):
        inventory.remove(entry)
    assert (slot.path / "m.gguf.partial").exists() and [each.name for each in mac.store.iterdir()] == [slot.name]


def test_a_slot_that_became_a_link_is_not_removed(mac: Mac, tmp_path: Path) -> None:
    slot = mac.slot(HUB)
    (entry,) = inventory.look(mac.store, mac.state, mac.store / "ollama").entries
    slot.path.rename(tmp_path / "precious")
    slot.path.symlink_to(tmp_path / "precious")
    with pytest.raises(OSError, match="is not below the model store"):
        inventory.remove(entry)
    assert (tmp_path / "precious" / "m.gguf").exists()


def test_a_record_that_cannot_be_read_may_use_anything(mac: Mac) -> None:
    slot = mac.slot(HUB)
    mac.state.record_path("default.tiny").write_text("{")
    for words in (("rm", slot.name), ("gc", "--keep", "0")):
        assert "what default.tiny uses is not known" in mac.models(*words, "--yes", code=1)
    assert slot.path.exists()


def test_a_directory_of_the_system_that_cannot_be_read_is_not_taken_for_the_store(mac: Mac) -> None:
    (mac.state.path / "records").rmdir()
    (mac.state.path / "records").write_text("")
    assert f"{mac.state.path / 'records'}: Not a directory" in mac.models("ls", code=1)


def test_nobody_can_be_asked_without_a_terminal(mac: Mac) -> None:
    slot = mac.slot(HUB)
    assert "add --yes" in mac.models("rm", slot.name, code=1, stdin="y\n")
    assert slot.path.exists()


@pytest.mark.parametrize(("answer", "stays"), [("y", False), ("n", True), ("", True)])
def test_on_a_terminal_it_asks(mac: Mac, answer: str, stays: bool) -> None:
    slot = mac.slot(HUB)
    main, terminal = pty.openpty()
    command = [sys.executable, "-m", "metal_supervisor", "models", "rm", slot.name, "--state-dir", str(mac.state.path)]
    with subprocess.Popen(command, stdin=terminal, stdout=terminal, stderr=terminal) as process:
        os.close(terminal)
        said = b""
        while b"[y/N] " not in said:
            assert select.select([main], [], [], 30)[0], said
            said += os.read(main, 4096)
        os.write(main, answer.encode() + b"\n")
        assert process.wait(30) == (1 if stays else 0)
    os.close(main)
    assert b"Delete 1 directory, 1 MiB?" in said and slot.path.exists() is stays


def test_no_link_is_followed(mac: Mac, tmp_path: Path) -> None:
    slot = mac.slot(HUB)
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "file").write_text("x")
    (slot.path / "in").symlink_to(precious)
    mac.models("rm", slot.name, "--yes")
    assert (precious / "file").exists() and not slot.path.exists()


def test_hard_links_elsewhere_free_nothing_and_are_told(mac: Mac) -> None:
    slot = mac.slot(HUB, 2 * MIB)
    theirs = mac.store / "their-model"
    theirs.mkdir()
    os.link(slot.path / "m.gguf", theirs / "m.gguf")
    assert mac.models("ls").splitlines()[-1].startswith("2 MiB in ")
    said = mac.models("rm", slot.name, "--yes")
    assert "0 MiB freed; 2 MiB stay, for those files have other names too (hard links)" in said
    assert (theirs / "m.gguf").exists()
    assert "LLMKube's own, remove it by hand" in mac.models("rm", "their-model", "--yes", code=4)


def test_what_matches_nothing_or_several_is_refused(mac: Mac) -> None:
    slot = mac.slot(HUB)
    twin = ModelDirectory(mac.store, slot.name[:8] + "0" * 8)
    twin.prepare()
    twin.write(Contents("hf://o/r@main", "m.gguf"))
    assert f"may be any of {', '.join(sorted([slot.name, twin.name]))}" in mac.models("rm", slot.name[:4], code=4)
    assert "is no model in" in mac.models("rm", "hf://o/other/m.gguf", "--yes", code=4)
    assert "is no model in" in mac.models("rm", "", "--yes", code=4)


def test_a_removed_model_forgets_a_digest_that_did_not_match(mac: Mac) -> None:
    slot = mac.slot(HUB, whole=False)
    contents = slot.read()
    assert contents is not None
    slot.write(replace(contents, mismatch=("a" * 64, "b" * 64)))
    assert "refused: its sha256 is another" in mac.models("ls")
    mac.models("rm", slot.name, "--yes")
    assert slot.read() is None


# ── gc ───────────────────────────────────────────────────────────────────────────────────────────


def test_without_options_only_leftovers_go_and_the_options_are_told(mac: Mac) -> None:
    whole, used = mac.slot(HUB, 2 * MIB, 40 * DAY), mac.slot("https://h/used.gguf", 4 * MIB, 90 * DAY)
    mac.uses(used.path / "m.gguf")
    left, fresh = mac.slot("https://h/left.gguf", 8 * MIB, DAY, False), mac.slot("https://h/new.gguf", whole=False)
    waits = mac.slot("https://h/waits.gguf?sig=1", idle_s=DAY, whole=False)
    mac.reports("https://h/waits.gguf?sig=2", ModelFile("Pending"))
    going = mac.store / ".removed-0123456789abcdef-7"
    going.mkdir()
    (going / "m.gguf").write_bytes(bytes(MIB))
    said = mac.models("gc", "--yes")
    assert f"{left.name}  4 MiB of 8 MiB  https://h/left.gguf: never became whole" in said
    assert "5 MiB freed" in said and not left.path.exists() and not going.exists()
    assert all(each.path.exists() for each in (whole, used, fresh, waits))
    assert "nothing uses 1 of the models, 2 MiB" in said
    assert "--keep 0     1 of them, 2 MiB" in said and "--older 30d  1 of them, 2 MiB" in said


def test_unused_models_go_as_the_options_say_the_longest_unused_first(mac: Mac) -> None:
    slots = {days: mac.slot(f"https://h/{days}.gguf", 2 * MIB, days * DAY) for days in (1, 20, 40, 60)}
    mac.uses(slots[60].path / "m.gguf")

    def there() -> set[int]:
        return {days for days, slot in slots.items() if slot.path.exists()}

    said = mac.models("gc", "--older", "30d", "--dry-run")
    assert f"{slots[40].name}  2 MiB  https://h/40.gguf: unused for 40 d" in said and "nothing was removed" in said
    assert there() == {1, 20, 40, 60}
    assert "2 MiB freed" in mac.models("gc", "--older", "30d", "--yes")
    assert there() == {1, 20, 60}
    mac.models("gc", "--size", "5Mi", "--yes")
    assert there() == {1, 60}
    assert "nothing has to go" in mac.models("gc", "--keep", "1")
    mac.models("gc", "--keep", "0", "--yes")
    assert there() == {60}


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("--keep", "-1"), "--keep must not be negative"),
        (("--size", "much"), "--size must be a size such as 200G"),
        (("--older", "30"), "--older must be a period such as 30d"),
    ],
)
def test_options_that_mean_nothing_are_refused(mac: Mac, words: tuple[str, str], text: str) -> None:
    assert text in mac.models("gc", *words, "--yes", code=2)


def test_a_partial_that_is_too_young_to_go_is_told(mac: Mac) -> None:
    slot = mac.slot("https://h/new.gguf", whole=False)
    said = mac.models("gc", "--dry-run")
    assert said.startswith("1 partial model was written to within 10 min") and said.count("\n") == 1
    assert slot.path.exists()


def test_an_empty_store_has_no_other_model(mac: Mac) -> None:
    assert mac.models("gc", "--yes") == "nothing is in the store\n"
