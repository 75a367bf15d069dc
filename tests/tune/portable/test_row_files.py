"""Rows as files: the same text for the same result, signatures, and nothing but typed errors for what is no row."""

from __future__ import annotations

import copy
import json
import random

import pytest

from jcuts.base.errors import CacheError
from jcuts.tune.database import Store
from jcuts.tune.database_rows import Row
from jcuts.tune.portable import row_files
from jcuts.tune.portable.file_store import FileStore, read_key
from jcuts.tune.row_signature import CHECKED_IN, FOREIGN, OTHER_VERSIONS, TUNED
from tests.tune.test_database import make_choice

KEY = b"a key of the team"


def row(problem="p" * 64, seconds=1e-3, created=1.0, device="here", versions="v1", **more):
    value = json.loads(json.dumps(make_choice(problem, seconds).to_json() | more))
    return Row("choice", problem, device, versions, created, value)


def store_of(folder, key=None, path=None, versions="v1"):
    return FileStore(path, device="here", versions=versions, folders=[folder], key=key)


def test_files_are_one_per_row_and_stay_while_the_result_does(tmp_path):
    rows = [row(), row("q" * 64, name="relu 3"), Row("guard", "g", "here", "v1", 1.0, {"chosen": "jcuts:wide"})]
    assert row_files.write(tmp_path, rows) == (3, 0)
    names = sorted(path.name for path in tmp_path.iterdir())
    assert [name.rsplit("-", 1)[0] for name in names] == [
        "choice-" + 16 * "p",
        "choice-relu-3-" + 16 * "q",
        "guard-jcuts-wide-g",
    ]
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    assert row_files.write(tmp_path, [row(created=2.0), *rows[1:]]) == (0, 3)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    assert row_files.write(tmp_path, [row(seconds=2e-3)]) == (1, 0)
    assert len(list(tmp_path.iterdir())) == 3
    assert row_files.write(tmp_path, [row(device="elsewhere"), row(versions="v2")]) == (2, 0)


def test_what_was_written_is_read_and_imported(tmp_path):
    row_files.write(tmp_path / "db", [row()])
    (found,), errors = row_files.read_folder(tmp_path / "db")
    assert (found.row, found.signed, errors) == (row(), False, [])
    store = Store(None, device="here", versions="v1")
    assert store.merge(sorted((tmp_path / "db").iterdir())) == 1
    assert store.lookup(row().key) == make_choice(row().key)


def test_signed_rows_count_and_others_are_foreign(tmp_path):
    row_files.write(tmp_path, [row()], KEY)
    assert store_of(tmp_path, KEY).choice(row().key)[1] == CHECKED_IN
    assert store_of(tmp_path).choice(row().key)[1] == FOREIGN
    assert store_of(tmp_path, b"another key of 16").choice(row().key)[1] == FOREIGN
    assert store_of(tmp_path, KEY, versions="v2").choice(row().key) == (None, "")
    assert store_of(tmp_path, KEY, versions="v2").other_choice(row().key)[1] == OTHER_VERSIONS
    assert row_files.write(tmp_path, [row()]) == (0, 1)  # who has no key leaves the signature alone
    assert row_files.write(tmp_path, [row(seconds=2e-3)]) == (1, 0)
    assert store_of(tmp_path, KEY).choice(row().key)[1] == FOREIGN


@pytest.mark.parametrize("edit", ["value", "device", "versions", "key", "signature"])
def test_an_edited_row_is_not_signed(tmp_path, edit):
    row_files.write(tmp_path, [row()], KEY)
    (path,) = tmp_path.iterdir()
    data = json.loads(path.read_text())
    (entry,) = data["entries"]
    if edit == "signature":
        data["signature"] = "0" * 64
    elif edit == "value":
        entry["value"]["measurements"][0]["seconds"] = 1e-9
    else:
        entry[edit] = entry[edit] + "x"
    if edit == "key":
        entry["value"]["problem"] = entry["key"]
    path.write_text(json.dumps(data))
    assert not row_files.read_file(path, KEY).signed


def test_another_time_of_measuring_keeps_the_signature(tmp_path):
    row_files.write(tmp_path, [row()], KEY)
    (path,) = tmp_path.iterdir()
    path.write_text(path.read_text().replace('"created": 1.0', '"created": 5.0'))
    assert row_files.read_file(path, KEY).signed


def test_the_own_database_goes_first_but_for_pinned_rows(tmp_path):
    path = tmp_path / "tuning.db"
    mine = make_choice(row().key, 5e-3)
    store_of(tmp_path / "none", path=path).put(mine)
    row_files.write(tmp_path / "db", [row()], KEY)
    found, source = store_of(tmp_path / "db", KEY, path).choice(row().key)
    assert (found, source) == (mine, TUNED)
    row_files.write(tmp_path / "db", [row(pinned=True)], KEY)
    found, source = store_of(tmp_path / "db", KEY, path).choice(row().key)
    assert (found.pinned, source) == (True, CHECKED_IN)


def test_a_pinned_row_of_other_schedules_is_one_to_check(tmp_path):
    other = {"schedules": {"cpu": "of another version"}}
    row_files.write(tmp_path, [row(**other)], KEY)
    assert store_of(tmp_path, KEY).other_choice(row().key) == (None, "")
    row_files.write(tmp_path, [row(pinned=True, **other)], KEY)
    choice, source = store_of(tmp_path, KEY).other_choice(row().key)
    assert (choice.pinned, source) == (True, OTHER_VERSIONS)
    assert store_of(tmp_path).other_choice(row().key)[1] == FOREIGN


def test_a_choice_that_was_wrong_is_not_offered_again(tmp_path):
    row_files.write(tmp_path, [row()])
    store = store_of(tmp_path, path=tmp_path / "tuning.db")
    store.drop(row().key)
    assert store.choice(row().key) == (None, "")


def test_noting_collects_what_was_found_and_stored(tmp_path):
    row_files.write(tmp_path, [row()], KEY)
    store = store_of(tmp_path, KEY, tmp_path / "tuning.db")
    store.put_guard("before", {"chosen": "xla"})
    with store.noting() as noted:
        store.choice(row().key)
        store.choice("nothing")
        store.put(make_choice("q"))
    assert noted == {("choice", row().key), ("choice", "q")}
    assert [(r.kind, r.key) for r in store.rows_of(noted)] == sorted(noted)


def test_unusable_files_are_told_and_the_others_count(tmp_path, caplog):
    row_files.write(tmp_path, [row()], KEY)
    (tmp_path / "notes.json").write_text("{}")
    (tmp_path / "half.json").write_text(next(tmp_path.glob("choice*")).read_text()[:100])
    (tmp_path / "two.json").write_text(json.dumps({"jcuts_tuning": 2, "entries": [row().__dict__] * 2}))
    (tmp_path / "README.md").write_text("not a row")
    store = store_of(tmp_path, KEY)
    assert len(store.errors) == 3
    assert store.choice(row().key)[1] == CHECKED_IN
    assert "notes.json" in caplog.text and "two.json holds 2 entries" in caplog.text
    assert "is no folder" in str(store_of(tmp_path / "missing").errors[0])


def test_keys(tmp_path):
    (tmp_path / "short").write_bytes(b"x" * 15)
    (tmp_path / "key").write_bytes(KEY)
    assert read_key(tmp_path / "key") == KEY
    assert read_key(None) is None
    for name in ("short", "missing"):
        with pytest.raises(CacheError, match=name):
            read_key(tmp_path / name)


def test_no_permission_is_a_typed_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CacheError, match="cannot write"):
        row_files.write(tmp_path / "file", [row()])


ODD = (None, True, -1, 1e999, "", "x\ny", [], {}, [None], {"a": 1}, 2**80, "../../etc", float("nan"))


def mutated(data, random_):
    """The data with one place replaced by something odd, removed, or doubled."""
    data = copy.deepcopy(data)
    places = [(data, name) for name in data]
    for at, name in places:
        if isinstance(at[name], (dict, list)):
            inner = at[name]
            places += [(inner, k) for k in (inner if isinstance(inner, dict) else range(len(inner)))]
    at, name = random_.choice(places)
    how = random_.randrange(3)
    if how == 0 and isinstance(at, dict):
        del at[name]
    elif how == 1 and isinstance(at, dict):
        at[str(name) + "x"] = at[name]
    else:
        at[name] = random_.choice(ODD)
    return data


def test_10000_mutated_files_are_typed_errors_or_unsigned_rows(tmp_path):
    """What a file says is a typed error or a row; only the text that was signed is followed without a check."""
    row_files.write(tmp_path, [row(name="softmax", pinned=True)], KEY)
    (path,) = tmp_path.iterdir()
    told = json.loads(path.read_text())
    signed_row = row_files.read_file(path, KEY).row
    random_ = random.Random(0)
    errors = foreign = 0
    for n in range(10_000):
        data = mutated(told, random_)
        path.write_text(json.dumps(data))
        try:
            found = row_files.read_file(path, KEY)
        except CacheError:
            errors += 1
            continue
        if found.signed:
            assert (found.row.kind, found.row.key, found.row.device, found.row.versions, found.row.value) == (
                signed_row.kind,
                signed_row.key,
                signed_row.device,
                signed_row.versions,
                signed_row.value,
            )
        else:
            foreign += 1
        if n % 20 == 0:
            assert store_of(tmp_path, KEY).choice(signed_row.key)[1] in ("", FOREIGN, CHECKED_IN)
    assert errors > 1000 and foreign > 1000
