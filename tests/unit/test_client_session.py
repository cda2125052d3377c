"""The ranks' common session: each rank a thread here, with real sockets and a stand-in for NVFlare on rank 0."""

from __future__ import annotations

import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import nvflare.client
import pytest
import torch
from nvflare.client import FLModel

from nvflare_torchrun_plugin import verdict
from nvflare_torchrun_plugin.client import links as links_module
from nvflare_torchrun_plugin.client.links import LinkError, Links, connect
from nvflare_torchrun_plugin.client.session import Session
from nvflare_torchrun_plugin.client.spread import Spread
from nvflare_torchrun_plugin.client.world import World

BOUND = 60.0


class OneProcessStore:
    """A stand-in for torch's store, which needs a server."""

    def __init__(self) -> None:
        self._values: dict[str, bytes] = {}
        self._news = threading.Condition()

    def set(self, key: str, value: str) -> None:
        with self._news:
            self._values[key] = value.encode()
            self._news.notify_all()

    def get(self, key: str) -> bytes:
        with self._news:
            if not self._news.wait_for(lambda: key in self._values, BOUND):
                raise RuntimeError(f"{key} was never set")
            return self._values[key]


@dataclass
class Nvflare:
    """A stand-in for ``nvflare.client``, of which only rank 0 may know."""

    tasks: list[FLModel | Exception | None] = field(default_factory=list)
    sent: list[FLModel] = field(default_factory=list)
    current: FLModel | None = None
    refuse: Exception | None = None

    def init(self, rank: str, config_file: str | None) -> str:
        if self.refuse is not None:
            raise self.refuse
        return f"context of rank {rank}"

    def receive(self, timeout: float | None = None) -> FLModel | None:
        if self.current is None:
            task = self.tasks.pop(0) if self.tasks else None
            if isinstance(task, Exception):
                raise task
            self.current = task
        return self.current

    def is_running(self) -> bool:
        return self.receive() is not None

    def send(self, model: FLModel, clear_cache: bool) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.sent.append(FLModel(params=dict(model.params)))
        if clear_cache:
            self.current = None

    def get_task_name(self) -> str:
        if self.current is None:
            raise RuntimeError("no current task")
        return "train"

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in ("init", "receive", "is_running", "send", "get_task_name"):
            monkeypatch.setattr(nvflare.client, name, getattr(self, name))
        for name, value in {
            "system_info": {"site_name": "site-1", "job_id": "j"},
            "get_config": {"k": "v"},
            "get_job_id": "j",
            "get_site_name": "site-1",
            "is_train": True,
            "is_evaluate": False,
            "is_submit_model": False,
            "shutdown": None,
        }.items():
            monkeypatch.setattr(nvflare.client, name, lambda value=value: value)


class Ranks:
    """All ranks of a group; what each runs, runs side by side."""

    def __init__(self, worlds: list[World]) -> None:
        self.told: list[tuple[int, str]] = []
        self._worlds = worlds
        self._pool = ThreadPoolExecutor(len(worlds))
        store = OneProcessStore()
        self.links: list[Links] = self.each(lambda world: connect(world, store, "127.0.0.1"), worlds)
        # The nodes' process group has tests with processes of its own.
        self.sessions = [
            Session(
                world,
                links,
                Spread(World(world.rank, 1, world.local_rank), links, None),
                lambda moment, rank=world.rank: self.told.append((rank, moment)),  # type: ignore[misc]
            )
            for world, links in zip(worlds, self.links, strict=True)
        ]

    def each(self, act: Callable[[Any], Any], given: list[Any]) -> list[Any]:
        return [future.result(BOUND) for future in self.begin(act, given)]

    def begin(self, act: Callable[[Any], Any], given: list[Any]) -> list[Future[Any]]:
        return [self._pool.submit(act, one) for one in given]

    def all(self, act: Callable[[Session], Any]) -> list[Any]:
        return self.each(act, self.sessions)

    def errors(self, act: Callable[[int, Session], Any]) -> list[tuple[type, str]]:
        """What is raised on each rank."""

        def catch(rank: int) -> tuple[type, str]:
            with pytest.raises(Exception) as caught:  # noqa: PT011 - the caller compares it
                act(rank, self.sessions[rank])
            return caught.type, str(caught.value)

        return self.each(catch, list(range(len(self.sessions))))

    def close(self) -> None:
        for links in self.links:
            links.close()
        self._pool.shutdown()


def worlds(*local_sizes: int) -> list[World]:
    size, nnodes = sum(local_sizes), len(local_sizes)
    return [
        World(sum(local_sizes[:node]) + local, size, local, count, node, nnodes)
        for node, count in enumerate(local_sizes)
        for local in range(count)
    ]


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> Nvflare:
    plain = Nvflare()
    plain.install(monkeypatch)
    return plain


@pytest.fixture
def ranks(plain: Nvflare) -> Iterator[Ranks]:
    """Three ranks on one node, in a session."""
    ranks = Ranks(worlds(3))
    assert ranks.all(lambda session: session.init(None)) == ["context of rank 0", None, None]
    yield ranks
    ranks.close()


def test_the_first_rank_of_each_node_tells_how_far_the_task_is(plain: Nvflare) -> None:
    ranks = Ranks(worlds(2, 2))
    plain.tasks = [FLModel(params={"a": torch.zeros(1)}), None]
    try:
        ranks.all(lambda session: session.init(None))
        ranks.all(lambda session: session.receive(None))
        ranks.all(lambda session: session.send(FLModel(params={}), True))
        ranks.all(lambda session: session.receive(None))
    finally:
        ranks.close()
    for rank in (0, 2):
        moments = [moment for who, moment in ranks.told if who == rank]
        assert moments == ["receive", "received", "send", "sent", "receive"]
    assert {who for who, _ in ranks.told} == {0, 2}


@pytest.mark.parametrize("local_sizes", [(1, 1), (2, 2), (1, 3, 2), (4,)])
def test_words_reach_rank_0_and_its_answer_every_rank(local_sizes: tuple[int, ...]) -> None:
    ranks = Ranks(worlds(*local_sizes))
    try:
        for turn in range(3):
            said = ranks.each(lambda links: links.gather(id(links)), ranks.links)
            assert said[1:] == [None] * (len(said) - 1)
            assert sorted(said[0]) == sorted(id(links) for links in ranks.links)
            # Each gives something; what rank 0 gives is what all get.
            given = [(links, (turn, number)) for number, links in enumerate(ranks.links)]
            assert ranks.each(lambda pair: pair[0].tell(pair[1]), given) == [(turn, 0)] * len(given)
    finally:
        ranks.close()


def test_whoever_does_not_know_the_token_is_turned_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "_GREETING_BOUND", 0.2)
    store, pool = OneProcessStore(), ThreadPoolExecutor(2)
    first = pool.submit(connect, World(0, 2, 0, 1, 0, 2), store, "127.0.0.1")
    port = store.get("nodes").split()[0].decode()
    wrong, silent = OneProcessStore(), OneProcessStore()
    wrong.set("nodes", f"{port} {'00' * 32}")
    silent.set("nodes", f"{port} 00")
    strangers = [connect(World(1, 2, 0, 1, 1, 2), strange, "127.0.0.1") for strange in (wrong, silent)]
    links = [connect(World(1, 2, 0, 1, 1, 2), store, "127.0.0.1"), first.result(BOUND)]
    try:
        for stranger in strangers:
            with pytest.raises(LinkError, match="rank 0 has ended"):
                stranger.tell()
        telling = pool.submit(links[1].tell, "hello")
        assert links[0].tell() == telling.result(BOUND) == "hello"
    finally:
        for one in (*links, *strangers):
            one.close()
        pool.shutdown()


def test_a_rank_that_never_comes_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "MEET_BOUND", 0.2)
    with pytest.raises(LinkError, match=r"0 of 1 have called init\(\) within 0.2 s: local ranks"):
        connect(World(0, 2, 0, 2, 0, 1), OneProcessStore(), "")


def test_every_rank_gets_the_model_and_its_own_copy_once_it_writes(ranks: Ranks, plain: Nvflare) -> None:
    weight = torch.arange(5.0)
    plain.tasks = [FLModel(params={"w": weight, "tied": weight}, current_round=4), None]
    models = ranks.all(lambda session: session.receive(None))
    assert models[0] is plain.current
    for rank, model in enumerate(models):
        assert model.current_round == 4
        assert model.params["tied"] is model.params["w"]
        model.params["w"][0] = rank
    assert [model.params["w"].tolist() for model in models] == [[rank, 1, 2, 3, 4] for rank in range(3)]
    # It is the same until it is sent.
    again = ranks.all(lambda session: session.receive(None))
    assert all(one is other for one, other in zip(again, models, strict=True))
    assert [session.task.name for session in ranks.sessions] == ["train"] * 3
    assert [session.site.site_name for session in ranks.sessions] == ["site-1"] * 3

    ranks.all(lambda session: session.send(models[ranks.sessions.index(session)], True))
    assert [model.params["w"].tolist() for model in plain.sent] == [[0, 1, 2, 3, 4]]
    assert [(model.params, session.task.name) for model, session in zip(models, ranks.sessions, strict=True)] == [
        (None, None)
    ] * 3
    assert ranks.all(lambda session: session.is_running()) == [False] * 3
    assert ranks.all(lambda session: session.receive(None)) == [None] * 3


def test_a_model_without_parameters_goes_too(ranks: Ranks, plain: Nvflare) -> None:
    plain.tasks = [FLModel(metrics={"a": 1})]
    assert [model.metrics for model in ranks.all(lambda session: session.receive(None))] == [{"a": 1}] * 3


def test_what_nvflare_raises_on_rank_0_is_raised_on_all(ranks: Ranks, plain: Nvflare) -> None:
    plain.tasks = [OSError(5, "aborted")]
    assert ranks.errors(lambda rank, session: session.receive(None)) == [(OSError, "[Errno 5] aborted")] * 3


def test_an_error_that_cannot_travel_is_told_in_words(ranks: Ranks, plain: Nvflare) -> None:
    class OddError(Exception):
        def __init__(self, one: int, two: int) -> None:
            super().__init__(f"{one} and {two}")

    plain.tasks = [OddError(1, 2)]
    assert ranks.errors(lambda rank, session: session.receive(None)) == [
        (OddError, "1 and 2"),
        *[(RuntimeError, "OddError: 1 and 2")] * 2,
    ]


@pytest.mark.parametrize("origin", [0, 1, 2])
def test_one_rank_is_to_blame_for_the_error_of_all(ranks: Ranks, plain: Nvflare, origin: int) -> None:
    def text(session: Session) -> str:
        try:
            session.send(FLModel(params={}) if ranks.sessions[origin] is not session else wrong, True)
        except (RuntimeError, TypeError):
            return traceback.format_exc()
        return ""

    wrong: Any = "no model"
    if origin == 0:
        wrong, plain.refuse = FLModel(params={}), RuntimeError("refused")
    texts = ranks.all(text)
    records = {
        rank: verdict.RankRecord(rank, rank, 1, ended=6.0 if rank == origin else 5.0, code=1, traceback=said)
        for rank, said in enumerate(texts)
    }
    reached = verdict.reach(
        [verdict.NodeRecord(0, "host", records)],
        stopped_at=None,
        reason=None,
        suspect=None,
        seconds=9.0,
    )
    assert reached.failure is not None
    assert (reached.failure.rank, reached.failure.traceback) == (origin, texts[origin])


def test_a_refused_session_is_refused_to_all(plain: Nvflare) -> None:
    plain.refuse = RuntimeError("HELLO not accepted")
    ranks = Ranks(worlds(2))
    try:
        assert ranks.errors(lambda rank, session: session.init(None)) == [(RuntimeError, "HELLO not accepted")] * 2
    finally:
        ranks.close()


def test_a_wrong_model_on_one_rank_is_everybodys_error(ranks: Ranks, plain: Nvflare) -> None:
    plain.tasks = [FLModel(params={})]
    ranks.all(lambda session: session.receive(None))
    wrong: Any = "no model"
    errors = ranks.errors(lambda rank, session: session.send(wrong if rank == 1 else FLModel(params={}), True))
    assert errors == [(TypeError, "rank 1: model is 'no model': must be an FLModel")] * 3
    assert plain.sent == []


def test_a_model_that_one_rank_cannot_take_is_everybodys_error(
    ranks: Ranks, plain: Nvflare, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(packed: object, descriptor: int | None) -> None:
        ranks.links[2].share(descriptor)
        raise MemoryError("none left on rank 2")

    plain.tasks = [FLModel(params={"w": torch.ones(3)})]
    monkeypatch.setattr(ranks.sessions[2]._spread, "bring", fails)
    assert ranks.errors(lambda rank, session: session.receive(None)) == [(MemoryError, "none left on rank 2")] * 3


def test_ranks_that_call_different_functions_are_told(ranks: Ranks) -> None:
    errors = ranks.errors(lambda rank, session: session.is_running() if rank == 2 else session.receive(None))
    assert {kind for kind, _ in errors} == {RuntimeError}
    assert {text.split(":")[0] for _, text in errors} == {"rank 0 has called receive(), rank 2 is_running()"}


def test_a_rank_that_has_left_is_missed_by_all(ranks: Ranks) -> None:
    def leave_or_receive(rank: int, session: Session) -> None:
        if rank == 1:
            ranks.links[1].close()
            raise LinkError("receive(): local rank 1 has ended")
        session.receive(None)

    assert ranks.errors(leave_or_receive) == [(LinkError, "receive(): local rank 1 has ended")] * 3


@pytest.mark.parametrize("launch_once", [False, True])
def test_the_task_of_a_launch_arrives_before_rank_0_leaves(
    ranks: Ranks, plain: Nvflare, monkeypatch: pytest.MonkeyPatch, launch_once: bool
) -> None:
    monkeypatch.setattr(nvflare.client, "get_config", lambda: {"TASK_EXCHANGE": {"launch_once": launch_once}})
    at_shutdown: list[FLModel | None] = []
    monkeypatch.setattr(nvflare.client, "shutdown", lambda: at_shutdown.append(plain.current))
    task = FLModel(params={})
    plain.tasks.append(task)
    for session in reversed(ranks.sessions):
        session.shutdown()
    assert at_shutdown == [None if launch_once else task]


def test_ranks_that_wait_hear_of_rank_0s_end(ranks: Ranks) -> None:
    waiting = ranks.begin(lambda session: session.is_running(), ranks.sessions[1:])
    ranks.sessions[0].shutdown()
    for future in waiting:
        with pytest.raises(LinkError, match=r"is_running\(\): the first rank of node 0 has ended"):
            future.result(BOUND)
