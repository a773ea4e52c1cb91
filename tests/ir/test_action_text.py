"""The text form of actions: exact both ways, and strict."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpbench.ir.action import HEAD, MOVES, OBJECTS, RECV, SEND, SUMS, Action, Kind, overlap, parse, text
from rpbench.ir.action import actions as made_of

NUMBERS = st.integers(0, 10**6)
PER_MICROBATCH = {Kind.F, Kind.B, Kind.I, Kind.W, Kind.R, Kind.FB, Kind.WAIT, *HEAD} | SEND | RECV | SUMS


@st.composite
def plain_actions(draw) -> Action:
    kind = draw(st.sampled_from([kind for kind in Kind if kind is not Kind.OVERLAP]))
    moved = draw(st.sampled_from(OBJECTS)) if kind in MOVES else None
    takes_microbatch = kind in PER_MICROBATCH or moved == "A"
    peers = st.none() | NUMBERS | st.sampled_from(["host", "nvme0", "peer_1"])
    return Action(
        kind,
        draw(NUMBERS),
        draw(NUMBERS) if takes_microbatch else None,
        draw(st.integers(0, 3)) if takes_microbatch else 0,
        draw(st.none() | NUMBERS),
        moved,
        draw(peers) if kind in SEND | RECV | MOVES else None,
    )


actions = plain_actions() | st.lists(plain_actions(), min_size=2, max_size=3).map(lambda sub: overlap(*sub))


@settings(deadline=None, max_examples=50)
@given(actions)
def test_a_token_is_read_back_as_the_action_it_was_written_for(action):
    assert parse(text(action)) == action


@settings(deadline=None, max_examples=50)
@given(actions.map(text), st.data())
def test_a_changed_token_is_refused_or_means_what_it_says(token, data):
    place = data.draw(st.integers(0, len(token)))
    character = data.draw(st.sampled_from("0123456789FBIWRPGOA@>:.;()_ STEPjunk\t\n-+٣²"))
    removed = data.draw(st.integers(0, 1))
    changed = token[:place] + character + token[place + removed :]
    try:
        action = parse(changed)
    except ValueError:
        return
    assert text(action) == changed


@pytest.mark.parametrize(
    "token, action",
    [
        ("2F5", Action(Kind.F, 2, 5)),
        ("2F5.1@4", Action(Kind.F, 2, 5, part=1, version=4)),
        ("12FB0", Action(Kind.FB, 12, 0)),
        ("3HF7", Action(Kind.HF, 3, 7)),
        ("7LOAD:P@3", Action(Kind.LOAD, 7, version=3, object="P")),
        ("0STORE:A5>host", Action(Kind.STORE, 0, 5, object="A", peer="host")),
        ("3SEND_F1>2", Action(Kind.SEND_F, 3, 1, peer=2)),
        ("4STEP@2", Action(Kind.STEP, 4, version=2)),
        ("(0F7;7B3)OVERLAP", overlap(Action(Kind.F, 0, 7), Action(Kind.B, 7, 3))),
    ],
)
def test_tokens_of_the_vocabulary(token, action):
    assert parse(token) == action
    assert str(action) == token


@pytest.mark.parametrize(
    "token",
    [
        "1F0junk",  # what a prefix match would let pass
        " 1F0",
        "1F0\n",
        "01F0",
        "1F00",
        "1F+1",
        "1f0",
        "F0",
        "1F",
        "1STEP3",
        "1F0.0",
        "1LOAD@3",
        "1F:P3",
        "1F3>2",
        "1STEP.1@3",
        "1LOAD:A.1",
        "0F٣",
        "0F1٣",
        "(0F0)OVERLAP",
        "(0F0;1B0)",
        "(0F0;1B0)OVERLAP_F_B",
        "(0F0;(1F0;1B0)OVERLAP)OVERLAP",
        "",
    ],
)
def test_a_bad_token_is_refused_by_name(token):
    inner = "(1F0" if token.startswith("(0F0;(") else token
    with pytest.raises(ValueError, match=re.escape(f"bad token {inner!r}")):
        parse(token)


def test_a_token_of_many_digits_is_refused_in_one_short_line():
    with pytest.raises(ValueError, match="at most 9 digits") as refused:
        parse("0F" + "9" * 5_000)
    assert len(str(refused.value)) < 300


def test_many_actions_are_those_made_one_by_one():
    made = made_of(Kind.F, 3, range(4, 7), part=1)
    assert made == [Action(Kind.F, 3, mb, 1) for mb in (4, 5, 6)]
    assert all(type(action) is Action for action in made)
