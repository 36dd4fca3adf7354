"""Users and tokens: a token's text is stored nowhere, and a forged, expired or revoked token belongs to no user."""

import pytest
from redline.base.errors import KeyTaken, NotFound, UsageError
from redline.service.records import Role
from sqlalchemy import text


@pytest.fixture
def ann(store):
    return store.add_user("ann", "admin", device_hours=100, searches=4, devices=8, weight=2)


def test_a_user_is_kept_as_added(store, ann):
    assert store.user("ann") == ann
    assert (ann.role, ann.device_hours, ann.searches, ann.devices, ann.weight) == (Role.ADMIN, 100.0, 4, 8, 2.0)
    bob = store.add_user("bob")
    assert (bob.role, bob.device_hours, bob.searches, bob.devices) == (Role.SUBMITTER, None, None, None)
    assert [each.name for each in store.users()] == ["ann", "bob"]


def test_a_token_is_its_user_s_until_it_expires_or_is_revoked(store, ann, clock):
    kept, brief = store.new_token(ann, "laptop"), store.new_token(ann.id, "ci", expires=clock.now + 60)
    assert store.user_of(kept) == store.user_of(brief) == ann
    clock.pass_by(60)
    assert store.user_of(brief) is None

    store.revoke(kept.split("_")[1][:6])
    assert store.user_of(kept) is None
    assert {each.name: each.revoked for each in store.tokens()} == {"laptop": clock.now, "ci": None}


def test_a_forged_token_belongs_to_no_user(store, ann):
    token = store.new_token(ann)
    prefix, name, secret = token.split("_", 2)
    forged = ["", "redline_", token[:-1], token + "x", token.upper()]
    forged += [f"{prefix}_{name}_", f"{prefix}_00000000_{secret}"]
    forged += ["redline_" + "\0" * 8 + "_x", "\ud800", "x" * 100_000, f"redline_{name}_{secret[::-1]}"]
    assert [store.user_of(each) for each in forged] == [None] * len(forged)


def test_the_database_does_not_hold_what_a_token_is(store, ann):
    token = store.new_token(ann)
    secret = token.split("_", 2)[2]
    row = store.database.read(lambda c: c.execute(text("SELECT * FROM redline_tokens")).one())
    assert not any(secret in str(each) or token in str(each) for each in row)


def test_a_token_is_revoked_by_its_text_and_by_nothing_ambiguous(store, ann):
    tokens = [store.new_token(ann) for _ in range(20)]
    store.revoke(tokens[0])
    assert store.user_of(tokens[0]) is None and store.user_of(tokens[1]) == ann
    ids = [each.split("_")[1] for each in tokens]
    shared = next(each for each in "0123456789abcdef" if sum(one.startswith(each) for one in ids) > 1)
    with pytest.raises(UsageError, match=f"several tokens begin with '{shared}'"):
        store.revoke(shared)
    for nothing in ("", "zz", "redline_"):
        with pytest.raises(NotFound, match="unknown token"):
            store.revoke(nothing)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"name": ""}, "a user's name must not be empty"),
        ({"name": "a" * 201}, "a user's name must have at most 200 printable characters, but got 'aaa"),
        ({"name": "a\0"}, "at most 200 printable characters"),
        ({"name": "x", "role": "boss"}, "unknown role 'boss'.*Known: admin, code, reader, submitter"),
        ({"name": "x", "device_hours": -1}, "device_hours must be above 0, but got -1"),
        ({"name": "x", "device_hours": float("nan")}, "device_hours must be above 0"),
        ({"name": "x", "searches": 0}, "searches must be a whole number of at least 1, but got 0"),
        ({"name": "x", "devices": 1.5}, "devices must be a whole number"),
        ({"name": "x", "weight": 0}, "weight must be above 0, but got 0"),
    ],
)
def test_a_user_that_cannot_be_is_refused(sqlite, given, message):
    with pytest.raises(UsageError, match=message):
        sqlite.add_user(**given)
    assert sqlite.users() == []


def test_names_are_taken_once(store, ann):
    with pytest.raises(KeyTaken, match="there is a user 'ann' already"):
        store.add_user("ann")
    with pytest.raises(NotFound, match="unknown user 'an'; did you mean 'ann'"):
        store.user("an")
    with pytest.raises(NotFound, match="there is no user 99"):
        store.new_token(99)
