"""Describes the machine that was measured."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import version
from pathlib import Path

from nvflare_torchrun_plugin.node.cores import allotted_cores


def _first(pattern: str, file: str) -> str:
    found = re.search(pattern, Path(file).read_text(), re.MULTILINE)
    return found.group(1) if found else "unknown"


def describe() -> list[str]:
    """Lines of Markdown: processor, cores, memory, system, versions."""
    memory = _first(r"^MemTotal:\s+(\d+) kB", "/proc/meminfo")
    gib = f"{int(memory) / 2**20:.0f} GiB" if memory.isdigit() else memory
    system = _first(r'^PRETTY_NAME="(.*)"', "/etc/os-release")
    processor = _first(r"^model name\s*: (.*)", "/proc/cpuinfo")
    packages = [f"{name} {version(name)}" for name in ("torch", "nvflare", "nvflare-torchrun-plugin")]
    return [
        f"- processor: {processor}; {allotted_cores()} of {os.cpu_count()} cores allotted",
        f"- memory: {gib}",
        f"- system: {system}, Linux {platform.release()}, Python {platform.python_version()}",
        f"- packages: {', '.join(packages)}",
    ]
