"""How what was imported ahead comes back, where a script would hardly let it be seen."""

from __future__ import annotations

import importlib
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
from standins import BOUND, until

from nvflare_torchrun_plugin.ranks import preloading, process_state
from nvflare_torchrun_plugin.ranks.agent_link import Orders


def test_what_comes_back_is_found_by_other_threads_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second NumPy, for one, cannot be loaded."""
    modules = {name: types.ModuleType(name) for name in ("ahead_a", "ahead_b")}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    group = preloading._Group(modules, process_state.State())
    group.hide()
    finder = preloading._Finder([group], list(sys.path))
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    found: list[object] = []
    show = group.show

    def look() -> None:
        found.append(importlib.import_module("ahead_b"))

    def slow() -> None:
        other = threading.Thread(target=look)
        other.start()
        others.append(other)
        # It has found the module, and waits for us to bring it back.
        until(lambda: "ahead_b" in asked, "nobody looks for it")
        show()

    others: list[threading.Thread] = []
    asked: list[str] = []
    find_spec = finder.find_spec

    def asks(name: str, *more: object) -> object:
        spec = find_spec(name, *more)
        asked.append(name)
        return spec

    monkeypatch.setattr(finder, "find_spec", asks)
    monkeypatch.setattr(group, "show", slow)
    assert importlib.import_module("ahead_a") is modules["ahead_a"]
    others[0].join(BOUND)
    assert found == [modules["ahead_b"]]
    assert finder not in sys.meta_path


def test_a_thread_of_a_library_that_imports_while_the_rank_waits_finds_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    monkeypatch.setitem(sys.modules, "__main__", types.ModuleType("__main__"))
    (tmp_path / "loaded_once.py").write_text("print('loaded')")
    hidden: list[bool] = []

    class Agent:
        """Lets the thread have its import before the task comes."""

        def wait_for_go(self, failed: list[str]) -> dict[str, str]:
            assert failed == []
            hidden.append("loaded_once" not in sys.modules)
            thread = threading.Thread(target=importlib.import_module, args=("loaded_once",))
            thread.start()
            thread.join(BOUND)
            return {}

    agent: Any = Agent()
    try:
        preloading.preload(Orders(False, str(tmp_path / "script.py"), [], ["loaded_once"]), [], agent)
    finally:
        sys.modules.pop("loaded_once", None)
    assert hidden == [True]
    assert capsys.readouterr().out == "loaded\n"
