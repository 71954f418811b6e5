# Copyright (c) torchrl_ext contributors.
# This source code is licensed under the MIT license found in the LICENSE file in the root directory.
"""Whoever works in chunks lets those in who wait."""

from __future__ import annotations

import threading

from torchrl_ext.data._yielding_lock import YieldingLock

DEADLINE = 60.0


def test_those_who_wait_have_entered_when_let_others_returns():
    lock, entered = YieldingLock(), []
    lock.PATIENCE = DEADLINE  # nobody is left behind here, however long it takes to wake up

    def visit(name: int) -> None:
        with lock:
            entered.append(name)

    for turn in range(20):
        with lock:
            visitors = [threading.Thread(target=visit, args=(turn,)) for _ in range(3)]
            for visitor in visitors:
                visitor.start()
            while len(lock._waiting) < 3:  # all three are at the door
                assert entered == [k for k in range(turn) for _ in range(3)]
        lock.let_others()
        assert not lock._waiting, "one that waited did not get in"
        for visitor in visitors:
            visitor.join(DEADLINE)
            assert not visitor.is_alive()
        assert entered.count(turn) == 3


def test_owner_enters_again():
    lock = YieldingLock()
    with lock, lock:
        pass
    assert not lock._waiting


def test_nobody_waits_after_an_error_inside():
    lock = YieldingLock()
    try:
        with lock:
            raise KeyError
    except KeyError:
        pass
    other = threading.Thread(target=lock.__enter__)
    other.start()
    other.join(DEADLINE)
    assert not other.is_alive(), "the lock was not released"
