"""Agreement before and after a factory: the same counts on every rank of a group, or the same error.

Ranks talk through the process group's store and never by a collective: a rank that fails, or that has
nothing to freeze, says so and goes on, the others are told as soon as they look, and no collective of the
factory's meets one of ours. Each rank of a group makes the same calls for a role, and shares in each of them
what it has found:

1. Each rank leaves a few words in the store: its list, and a digest of what it found.
2. The last one to come compares them all and writes a verdict, for which all the others wait.
3. Only where digests differ, the first rank that has each of them leaves what it found in full.
4. The last one to go deletes all that but the few words, which the next call overwrites.

A rank that fails writes the verdict in place of the last one to come, and waits for nobody.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, _get_process_group_store

from frozen_opt.errors import FreezeConfigError, FreezingError, UnsupportedBackendError
from frozen_opt.ranks.collectives import Group, distributed, failure_elsewhere

_calls: WeakKeyDictionary[Any, Counter[str]] = WeakKeyDictionary()
"""Group -> role -> how often this process was called for it."""


class Agreement:
    """One call for a role, as this rank takes part in it."""

    def __init__(self, role: str, group: Group) -> None:
        self.role = role
        self._shares = 0
        self._over = False
        self._store: Any = None
        self._refusal: UnsupportedBackendError | None = None
        if distributed(group):
            whole = group or dist.group.WORLD
            self._calls = _calls.setdefault(whole, Counter())
            self._calls[role] += 1
            self._call = self._calls[role]
            self._rank, self._size = dist.get_rank(whole), dist.get_world_size(whole)
            try:
                self._store = _store(whole)
            except UnsupportedBackendError as error:  # of which an empty list is to know nothing
                self._refusal = error

    def share(self, finding: Any, patterns: Sequence[str]) -> list[Any]:
        """The distinct findings of all ranks, in the order of the first rank that has each.

        Args:
            finding: Plain data: lists, strings, numbers.
            patterns: The role's list, which must be the same on every rank.

        Raises:
            FreezeConfigError: The ranks were given different roles or lists.
            FreezingError: Another rank failed; one of our errors is raised as it was there.
        """
        if self._refusal is not None:
            raise self._refusal
        if self._store is None:
            return [finding]
        self._shares += 1
        text = json.dumps(finding, separators=(",", ":"))
        digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        words = [self.role, self._call, list(patterns), dist.get_rank(), digest, self._key("")]
        self._store.set(f"rank{self._rank}", json.dumps(words))
        if self._store.add(self._key("come"), 1) == self._size:
            self._write_verdict(self._compare())
        verdict = json.loads(self._read(self._key("verdict"), patterns))
        holders: list[int] = verdict.get("holders", [])
        keys = [self._key(f"text{holder}") for holder in holders] if len(holders) > 1 else []
        if keys and self._rank in holders:
            self._store.set(self._key(f"text{self._rank}"), text)
        findings = [json.loads(self._read(key, patterns)) for key in keys] or [finding]
        self._leave(keys)
        self._over = not holders
        if "failed" in verdict:
            raise failure_elsewhere(self.role, *verdict["failed"])
        if "passed" in verdict:
            raise FreezeConfigError(
                f"role {self.role!r}: the list of rank {verdict['passed']} is empty, and that of rank "
                f"{dist.get_rank()} is {list(patterns)}. Every rank must read the same config"
            )
        return findings

    def fail(self, error: BaseException) -> BaseException:
        """Tell the other ranks that this one failed, at once and without waiting; returns what to raise.

        That is the rank's own error, unless another rank was first with one of ours: that is everybody's.
        """
        if self._store is None or self._over:  # over: it comes from another rank
            return error
        self._shares += 1
        self._over = True
        here = [dist.get_rank(), type(error).__name__, str(error)]
        try:
            first = json.loads(self._write_verdict({"failed": here})).get("failed", here)
            self._leave([])
        except Exception:  # the store went with the rank that held it; what failed here matters more
            return error
        if first == here:
            return error
        theirs = failure_elsewhere(self.role, *first)
        if isinstance(error, FreezingError):
            return error if first[1:] == here[1:] else theirs
        error.add_note(f"Before that: {theirs}")
        return error

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tell the other ranks what the body raises; see `fail`."""
        try:
            yield
        except BaseException as error:
            told = self.fail(error)
            if told is error:
                raise
            raise told from error

    def pass_by(self) -> None:
        """Leave word that this rank's list is empty, for ranks whose lists are not. Nobody is waited for."""
        if self._store is None:
            return
        self._shares += 1
        with suppress(Exception):  # an empty list changes nothing, not even where the store is gone
            self._write_verdict({"passed": dist.get_rank()})
            self._leave([])

    # --- in the store

    def _key(self, name: str) -> str:
        return f"{self.role}/{self._call}/{self._shares}/{name}"

    def _write_verdict(self, verdict: Mapping[str, Any]) -> bytes:
        """The verdict as it stands: the first one that is written."""
        first: bytes = self._store.compare_set(self._key("verdict"), "", json.dumps(verdict))
        return first

    def _compare(self) -> Mapping[str, Any]:
        holders: dict[str, int] = {}  # digest -> the first rank that has it
        first = self._words(0)
        for rank in range(self._size):
            words = self._words(rank)
            if words[2] != first[2]:
                return {"failed": _different(first, words)}
            holders.setdefault(words[4], rank)
        return {"holders": list(holders.values())}

    def _words(self, rank: int) -> list[Any]:
        words: list[Any] = json.loads(self._store.get(f"rank{rank}"))
        return words

    def _read(self, key: str, patterns: Sequence[str]) -> bytes:
        """The value of a key as soon as it is there.

        Looks again and again in place of `Store.wait`, which warns of each time-out, blocks what else the
        process asks of the store, and can't be interrupted.
        """
        start = time.monotonic()
        while not self._store.check([key]):
            waited = time.monotonic() - start
            if waited > 0.5:
                self._refuse_another_role()
            if waited > self._store.timeout.total_seconds():
                raise FreezingError(
                    f"role {self.role!r}, patterns {list(patterns)}: rank {dist.get_rank()} waited "
                    f"{waited:.0f} s for the others. Every rank of the group must call, also one that holds "
                    "none of the parameters; where only some do, pass these as group=..."
                )
            time.sleep(min(max(waited / 8, 1e-4), 0.25))
        value: bytes = self._store.get(key)
        return value

    def _refuse_another_role(self) -> None:
        """Two ranks that wait for each other in calls for different roles would do so for ever."""
        if self._rank == 0 or not self._store.check(["rank0"]):
            return
        there, here = self._words(0), self._words(self._rank)
        role, call = there[:2]
        waits = self._store.check([f"{there[5]}come"])  # words of a call that is over may still be there
        if role != self.role and self._calls[role] < call and waits:
            verdict = json.dumps({"failed": _different(there, here)})
            for theirs in sorted([there[5], here[5]]):
                verdict = self._store.compare_set(f"{theirs}verdict", "", verdict).decode()

    def _leave(self, keys: Sequence[str]) -> None:
        """Each rank does so once a share; the last one leaves only the words of the ranks behind."""
        if self._store.add(self._key("gone"), 1) == self._size:
            for key in (*map(self._key, ("come", "verdict", "gone")), *keys):
                self._store.delete_key(key)


def _different(first: Sequence[Any], other: Sequence[Any]) -> list[Any]:
    """The error for two ranks with other roles or lists, as `failure_elsewhere` takes it."""
    given = [f"rank {words[3]} has role {words[0]!r} with {words[2]}" for words in (first, other)]
    return [
        other[3],
        FreezeConfigError.__name__,
        f"ranks were given different lists to freeze: {', '.join(given)}. Every rank must read the same "
        "config",
    ]


def _store(group: Any) -> Any:
    try:
        return PrefixStore("frozen_opt", _get_process_group_store(group))
    except Exception as error:
        raise UnsupportedBackendError(
            f"this process group ({dist.get_backend(group)}) has no store through which its ranks could "
            f"agree: pass a group that torch.distributed made as group=... ({type(error).__name__}: {error})"
        ) from error
