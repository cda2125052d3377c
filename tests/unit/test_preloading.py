"""How what was imported ahead comes back, where a script would hardly let it be seen."""

from __future__ import annotations

import importlib
import sys
import threading
import types

import pytest
from standins import BOUND, until

from nvflare_torchrun_plugin.ranks import preloading


def test_what_comes_back_is_found_by_other_threads_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second NumPy, for one, cannot be loaded."""
    modules = {name: types.ModuleType(name) for name in ("ahead_a", "ahead_b")}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    group = preloading._Group(modules, preloading._State())
    group.hide()
    finder = preloading._Finder([group])
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
