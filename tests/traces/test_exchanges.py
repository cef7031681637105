"""The exchange log keeps every action and answer exactly, or refuses to."""

from __future__ import annotations

import gzip
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests.support.marks import examples
from traces.exchanges import Exchange, LogStream, action_text, decode, encode, lines_of, read_log, write_log
from traces.schema import setting_from, setting_text
from tuners import policies
from tuners.actions import (
    Action,
    Cost,
    Evaluate,
    Evaluation,
    Fork,
    Free,
    GradientNoise,
    Install,
    MeasureNoise,
    NodeEvent,
    Pushes,
    Reconfigure,
    Rejected,
    Run,
    ServerWindow,
    Setting,
    Window,
    WorkerWindow,
)
from tuners.settings import Node

FLOATS = st.floats()  # nan and the infinities too
NAMES = st.text(min_size=1, max_size=6)
SCALARS = st.one_of(st.floats(allow_nan=False), st.integers(-(2**53), 2**53), st.booleans(), st.text(max_size=8))
COUNTS = st.integers(0, 2**40)
NODES = st.builds(Node, NAMES, NAMES, st.integers(1, 96), st.tuples(NAMES), FLOATS, FLOATS)
SETTINGS = st.builds(
    Setting,
    workers=st.lists(NAMES, min_size=1, max_size=3).map(tuple),
    servers=st.lists(NAMES, min_size=1, max_size=3).map(tuple),
    loads=st.lists(st.tuples(COUNTS, COUNTS), max_size=2).map(tuple),
    data_shares=st.lists(st.floats(0, 1), max_size=3).map(tuple),
    options=st.lists(st.tuples(NAMES, SCALARS), max_size=3).map(tuple),
    learning_rate=st.floats(0, 10),
    local_steps=st.sampled_from([1, 7]),
    outer_rate=st.sampled_from([1.0, 0.7]),
    outer_momentum=st.sampled_from([0.0, 0.9]),
)


@st.composite
def pushes(draw: Any) -> Pushes:
    size = draw(st.integers(0, 4))
    made = [
        draw(hnp.arrays(np.int32 if name in ("worker", "clock", "staleness") else np.float64, size))
        for name in Pushes._fields
    ]
    return Pushes(*made)


COSTS = st.builds(
    Cost,
    seconds=FLOATS,
    stall_seconds=FLOATS,
    slow_seconds=FLOATS,
    bytes_moved=FLOATS,
    steps=st.lists(NAMES).map(tuple),
    done=st.booleans(),
)
EVENTS = st.builds(NodeEvent, FLOATS, NAMES, st.sampled_from(["joined", "leaving", "left", "failed"]))
WINDOWS = st.builds(
    Window,
    start_seconds=FLOATS,
    end_seconds=FLOATS,
    clocks=COUNTS,
    pushes=pushes(),
    workers=st.lists(
        st.builds(
            WorkerWindow, NAMES, COUNTS, COUNTS, FLOATS, FLOATS, FLOATS, FLOATS, st.lists(FLOATS, max_size=2).map(tuple)
        ),
        max_size=2,
    ).map(tuple),
    evaluations=st.lists(st.builds(Evaluation, FLOATS, COUNTS, FLOATS, FLOATS), max_size=2).map(tuple),
    events=st.lists(EVENTS, max_size=2).map(tuple),
    nodes=st.lists(NODES, max_size=2).map(tuple),
    setting=st.none() | SETTINGS,
    changes=st.lists(COSTS, max_size=2).map(tuple),
    servers=st.lists(st.builds(ServerWindow, NAMES, FLOATS, FLOATS, FLOATS, FLOATS), max_size=2).map(tuple),
    status=st.sampled_from(["running", "target", "budget", "diverged", "deadlock"]),
)
RUNS = st.one_of(
    st.builds(Run, clocks=st.integers(1, 9**9)),
    st.builds(Run, seconds=st.floats(min_value=0, exclude_min=True), branch=st.integers(0, 9), reason=st.text(max_size=9)),
)
REFUSED = st.builds(Rejected, st.text(max_size=20))
PAIRS = st.one_of(
    st.tuples(RUNS, WINDOWS | REFUSED),
    st.tuples(
        st.builds(Reconfigure, SETTINGS, st.sampled_from([None, "checkpoint", "migrate"]), wait=st.booleans(), reason=NAMES),
        COSTS | REFUSED,
    ),
    st.tuples(st.builds(Fork, st.integers(0, 9), st.none() | SETTINGS, st.booleans()), st.integers(0, 99) | REFUSED),
    st.tuples(st.builds(Free, st.integers(0, 9)), st.none() | REFUSED),
    st.tuples(st.builds(Evaluate, st.integers(0, 9)), st.builds(Evaluation, FLOATS, COUNTS, FLOATS, FLOATS) | REFUSED),
    st.tuples(st.builds(MeasureNoise, st.integers(0, 9)), st.builds(GradientNoise, FLOATS, FLOATS, FLOATS) | REFUSED),
)
EXCHANGES = st.builds(lambda seconds, pair, asked: Exchange(seconds, *pair, asked), FLOATS, PAIRS, st.booleans())


def same(a: Any, b: Any) -> bool:
    """Equal as the contract's types are, with nan equal to nan, arrays compared bit for bit."""
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.tobytes() == b.tobytes() if a.dtype.kind != "f" else bool(_same_floats(a, b))
    if isinstance(a, float) and isinstance(b, float):
        return (math.isnan(a) and math.isnan(b)) or (a == b and math.copysign(1, a) == math.copysign(1, b))
    if isinstance(a, Rejected):
        return isinstance(b, Rejected) and a.args == b.args
    if isinstance(a, tuple):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    if hasattr(a, "__dataclass_fields__"):
        return type(a) is type(b) and all(same(getattr(a, f), getattr(b, f)) for f in a.__dataclass_fields__)
    return type(a) is type(b) and bool(a == b)


def _same_floats(a: Any, b: Any) -> bool:
    return a.dtype == b.dtype and all(map(same, a.tolist(), b.tolist()))


@examples(15)
@given(EXCHANGES)
def test_what_is_decoded_is_what_was_encoded(exchange: Exchange) -> None:
    line = encode(exchange)
    assert b"\n" not in line
    assert same(decode(line), exchange)
    assert encode(decode(line)) == line


def test_a_reason_is_logged_and_is_no_part_of_what_is_asked() -> None:
    plain, reasoned = Run(clocks=3), Run(clocks=3, reason="rate .1 held: a trial costs 9 s and saves 4 s")
    assert action_text(plain) == action_text(reasoned)
    assert b"reason" not in encode(Exchange(1.0, plain, Rejected("no")))
    assert decode(encode(Exchange(1.0, reasoned, Rejected("no")))).action == reasoned
    installed = Exchange(1.0, Install(policies.named("asp", 0), reason="nobody waits"), None)
    assert decode(encode(installed)).action.reason == "nobody waits"


def test_an_installed_policy_is_kept_by_name() -> None:
    wanted = policies.ssp(3)._replace(probes=True, seconds=0.25)
    again = decode(encode(Exchange(1.0, Install(wanted, branch=2), None)))
    assert isinstance(again.action, Install)
    assert (again.action.policy.name, again.action.policy.probes, again.action.policy.seconds) == ("ssp(3)", True, 0.25)
    assert again.action.branch == 2
    with pytest.raises(ValueError, match=r"policy 'ssp\(3\)'"):
        again.action.policy.init(None)


def test_numpy_scalars_of_a_tuner_are_kept_as_numbers() -> None:
    setting = Setting(workers=("a",), servers=("b",), batch_size=np.int64(8), learning_rate=np.float32(0.5))  # type: ignore[arg-type]
    again = decode(encode(Exchange(0.0, Reconfigure(setting), Cost(seconds=1.0, stall_seconds=1.0))))
    assert again.action == Reconfigure(setting)


def test_an_action_outside_the_contract_is_not_recorded() -> None:
    class Unknown(Action[int]):
        pass

    with pytest.raises(TypeError, match="no action of the contract"):
        encode(Exchange(0.0, Unknown(), 1))


def test_equal_actions_have_equal_texts() -> None:
    assert action_text(Run(clocks=3)) == action_text(Run(clocks=3))
    assert action_text(Run(clocks=3)) != action_text(Run(clocks=4))
    assert action_text(Install(policies.asp())) == action_text(Install(policies.asp()))
    assert action_text(Install(policies.asp())) != action_text(Install(policies.bsp()))


def test_the_same_log_gives_the_same_bytes(tmp_path: Path) -> None:
    log = [Exchange(0.1 * i, Run(seconds=0.1), Rejected(f"no {i}")) for i in range(50)]
    write_log(tmp_path / "a.gz", log)
    write_log(tmp_path / "longer-name.gz", log)
    assert (tmp_path / "a.gz").read_bytes() == (tmp_path / "longer-name.gz").read_bytes()
    again = read_log(tmp_path / "a.gz")
    assert [e.seconds for e in again] == [e.seconds for e in log]
    assert [str(e.answer) for e in again] == [str(e.answer) for e in log]


def test_a_damaged_log_is_named(tmp_path: Path) -> None:
    path = tmp_path / "exchanges.jsonl.gz"
    write_log(path, [Exchange(0.0, Free(1), None)] * 30)
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    with pytest.raises(ValueError, match=r"exchanges\.jsonl\.gz: it is damaged or cut short"):
        read_log(path)
    path.write_bytes(gzip.compress(b'{"exchanges": 1}\n{"seconds": 1}\n'))
    with pytest.raises(ValueError, match=r"exchanges\.jsonl\.gz, line 2"):
        read_log(path)
    path.write_bytes(gzip.compress(b'{"exchanges": 99}\n'))
    with pytest.raises(ValueError, match="no exchange log of this version"):
        read_log(path)


def test_an_exchange_of_an_unknown_kind_is_refused() -> None:
    line = encode(Exchange(0.0, Free(1), None)).replace(b'"Free"', b'"Other"')
    with pytest.raises(ValueError, match="kind 'Other'"):
        decode(line)


def test_a_log_can_be_read_up_to_its_last_exchange_while_it_is_written(tmp_path: Path) -> None:
    stream, path, exchanges = LogStream(), tmp_path / "log.gz", [free(i) for i in range(3)]
    assert list(lines_of(write(path, stream.part()))) == []
    for number, exchange in enumerate(exchanges, start=1):
        write(path, stream.part(encode(exchange)))
        assert [decode(line) for line in lines_of(path)] == exchanges[:number]
    with pytest.raises(ValueError, match="cut short"):
        read_log(path)
    assert read_log(write(path, stream.end())) == exchanges


@settings(max_examples=30)
@given(st.integers(0, 10**6))
def test_a_log_that_was_cut_has_its_first_exchanges(tmp_path_factory: pytest.TempPathFactory, at: int) -> None:
    path, stream, exchanges = tmp_path_factory.mktemp("cut") / "log.gz", LogStream(), [free(i) for i in range(50)]
    ends = [path.stat().st_size for e in exchanges if write(path, stream.part(encode(e)))]
    whole = path.read_bytes()
    at %= len(whole)
    path.write_bytes(whole[:at])
    read = [decode(line) for line in lines_of(path)]
    assert read == exchanges[: len(read)]
    assert len(read) >= sum(end <= at for end in ends)


def test_a_log_that_was_changed_is_refused(tmp_path: Path) -> None:
    path, stream = tmp_path / "log.gz", LogStream()
    write(path, stream.part(*(encode(free(i)) for i in range(50))))
    whole = path.read_bytes()
    path.write_bytes(whole[:60] + bytes(b ^ 0xFF for b in whole[60:80]) + whole[80:])
    with pytest.raises(ValueError, match="it is damaged"):
        [decode(line) for line in lines_of(path)]
    path.write_bytes(gzip.compress(b'{"exchanges": 99}\n'))
    with pytest.raises(ValueError, match="no exchange log of this version"):
        list(lines_of(path))


def free(number: int) -> Exchange:
    return Exchange(number / 7, Free(number), None)


def write(path: Path, made: bytes) -> Path:
    with path.open("ab") as log:
        log.write(made)
    return path


@given(SETTINGS.filter(lambda s: all(not isinstance(v, float) or math.isfinite(v) for _, v in s.options)))
def test_a_setting_without_local_steps_does_not_name_them(setting: Setting) -> None:
    """Logs and results of such jobs are the same bytes as before there were local steps."""
    local = (setting.local_steps, setting.outer_rate, setting.outer_momentum) != (1, 1.0, 0.0)
    assert ("local_steps" in action_text(Reconfigure(setting))) == local
    assert ("local_steps" in setting_text(setting)) == local
    assert setting_from(setting_text(setting)) == setting
