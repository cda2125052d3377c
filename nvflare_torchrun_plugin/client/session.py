"""The session with NVFlare that all ranks of a group share: rank 0 has it, and every rank hears of it.

A call comes in two steps. First every rank says to rank 0 that it has come, and to which function; then rank 0
does what is to be done, and tells all what came of it, a value or an error. So no rank goes on alone, and rank 0
does not end its work with NVFlare while another is still in a collective of the script's.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import nvflare.client
from nvflare.app_common.abstract.fl_model import FLModel

from nvflare_torchrun_plugin.client.links import LinkError, Links
from nvflare_torchrun_plugin.client.spread import Spread
from nvflare_torchrun_plugin.client.world import World
from nvflare_torchrun_plugin.ranks import task_on_its_way

_T = TypeVar("_T")


@dataclass(frozen=True)
class _Task:
    """What the API can say of the current task; as it answers when there is none."""

    name: str | None = None
    train: bool = False
    evaluate: bool = False
    submit_model: bool = False


@dataclass(frozen=True)
class _Site:
    """What the API can say of the session from its begin on."""

    system_info: dict[str, Any]
    config: dict[str, Any]
    job_id: str
    site_name: str


class Session:
    """One rank's part of it.

    Args:
        world: this rank.
        links: to the other ranks.
        spread: brings rank 0's model to every rank.
        tell: is told, on each node's first rank, how far the task is (see ``wire.MOMENTS``).
    """

    def __init__(
        self, world: World, links: Links, spread: Spread, tell: Callable[[str], None] = lambda _: None
    ) -> None:
        self._world = world
        self._links = links
        self._spread = spread
        self._tell = tell if world.leads_node else lambda _: None
        self._task = _Task()
        self._model: FLModel | None = None
        self._site = _Site({}, {}, "", "")

    @property
    def site(self) -> _Site:
        """What is known since :meth:`init`."""
        return self._site

    @property
    def task(self) -> _Task:
        """What is known of the current task."""
        return self._task

    @property
    def logs(self) -> bool:
        """Whether what this rank logs is sent."""
        return self._world.rank == 0

    def init(self, config_file: str | None) -> Any:
        """Begin NVFlare's session on rank 0; return its context there, None elsewhere."""
        context = None

        def begin() -> _Site:
            nonlocal context
            context = nvflare.client.init(rank="0", config_file=config_file)
            return _Site(
                dict(nvflare.client.system_info()),
                dict(nvflare.client.get_config()),
                nvflare.client.get_job_id(),
                nvflare.client.get_site_name(),
            )

        self._agree("init", self._spread.open)
        self._site = self._call("init", begin)
        return context

    def is_running(self) -> bool:
        """As ``nvflare.client.is_running``."""
        self._tell("receive")
        running, self._task = self._call("is_running", lambda: (nvflare.client.is_running(), self._current_task()))
        return bool(running)

    def receive(self, timeout: float | None) -> FLModel | None:
        """As ``nvflare.client.receive``."""
        self._tell("receive")
        model: FLModel | None = None

        def take() -> tuple[str, _Task]:
            nonlocal model
            model = nvflare.client.receive(timeout)
            news = "none" if model is None else "same" if model is self._model else "new"
            return news, self._current_task()

        news, self._task = self._call("receive", take)
        if news == "new":
            # Rank 0's own object must stay the one that NVFlare has handed out, and compares results with.
            packed = self._call("receive", lambda: self._spread.describe(model))
            descriptor = self._agree("receive", lambda: self._spread.reserve(packed), self._spread.release)
            received = self._agree("receive", lambda: self._spread.bring(packed, descriptor))
            if model is not None:
                vars(model).update(vars(received))
            self._model = model if model is not None else received
        elif news == "none":
            self._model = None
        if self._model is not None:
            self._tell("received")
        return self._model

    def send(self, model: FLModel | None, clear_cache: bool) -> None:
        """As ``nvflare.client.send``; only rank 0's model is sent, others may give None."""
        problem = None
        self._tell("send")
        if not isinstance(model, FLModel) and (model is not None or self._world.rank == 0):
            problem = TypeError(f"rank {self._world.rank}: model is {model!r}: must be an FLModel")
        self._call("send", lambda: nvflare.client.send(model, clear_cache), problem)
        if clear_cache:
            for cleared in (model, self._model):
                if cleared is not None:
                    cleared.params = cleared.optimizer_params = None
            self._model, self._task = None, _Task()
        self._tell("sent")

    def shutdown(self) -> None:
        """End this rank's part; whoever still waits for it is told that it has ended."""
        if self._world.rank == 0:
            task_on_its_way.let_arrive(nvflare.client)
            nvflare.client.shutdown()
        self._links.close()

    @staticmethod
    def _current_task() -> _Task:
        try:
            name = nvflare.client.get_task_name()
        except RuntimeError:  # there is none
            return _Task()
        return _Task(
            name, nvflare.client.is_train(), nvflare.client.is_evaluate(), nvflare.client.is_submit_model()
        )

    def _call(self, name: str, act: Callable[[], _T], problem: Exception | None = None) -> _T:
        """Return what ``act`` returns on rank 0, once every rank has come to the same call without a problem."""
        try:
            words = self._links.gather((self._world.rank, name, _portable(problem)))
            told, refused, origin = self._links.tell() if words is None else (None, None, None)
        except LinkError as e:
            raise LinkError(f"{name}(): {e}") from e
        if words is None:
            if refused is not None:
                raise self._traced(refused, origin)
            return cast(_T, told)
        error, origin = _problem_in(words)
        value = None
        if error is None:
            try:
                value = act()
            except Exception as e:  # noqa: BLE001 - every rank must learn of it, whatever it is
                error, origin = e, self._world.rank
        self._links.tell((value if error is None else None, _portable(error), origin))
        if error is not None:
            raise self._traced(error, origin)
        return value  # type: ignore[return-value]  # without an error it is what act() has returned

    def _traced(self, error: Exception, origin: int | None) -> Exception:
        """Let the traceback tell whose error it is: all raise it at once, and one is to blame."""
        if origin not in (None, self._world.rank):
            error.__cause__ = LinkError(f"rank {origin} raised what follows")
        return error

    def _agree(self, name: str, act: Callable[[], _T], undo: Callable[[_T], None] = lambda _: None) -> _T:
        """Run ``act`` on every rank; return this rank's value, or ``undo`` it where another has failed."""
        value, problem = None, None
        try:
            value = act()
        except Exception as e:  # noqa: BLE001 - every rank must learn of it, whatever it is
            problem = e
        try:
            self._call(name, lambda: None, problem)
        except BaseException:
            if problem is None:
                undo(cast(_T, value))
            raise
        return cast(_T, value)


def _problem_in(words: list[Any]) -> tuple[Exception | None, int | None]:
    """Return what keeps the ranks from the call that rank 0 has come to: the lowest rank's problem, if any.

    With it comes the rank whose own error it is, if it is one's.
    """
    gone = [word for word in words if isinstance(word, LinkError)]
    came = sorted((word for word in words if not isinstance(word, LinkError)), key=lambda word: word[0])
    name = came[0][1]
    if gone:
        return LinkError(f"{name}(): {gone[0]}"), None
    for rank, other, problem in came:
        if other != name:
            differs = RuntimeError(
                f"rank 0 has called {name}(), rank {rank} {other}(): every rank must call each of init(), "
                "is_running(), receive() and send(), in the same order"
            )
            return differs, None
        if problem is not None:
            return problem, rank
    return None, None


def _portable(error: Exception | None) -> Exception | None:
    """Return the error, or one that says the same where it cannot be pickled."""
    if error is None:
        return None
    try:
        again = pickle.loads(pickle.dumps(error))  # noqa: S301 - our own
    except Exception:  # noqa: BLE001 - an exception's own code runs here
        again = None
    return error if type(again) is type(error) else RuntimeError(f"{type(error).__name__}: {error}")
