"""What is read from a script's text, without running it, as what its ranks can import ahead."""

from __future__ import annotations

from pathlib import Path

import pytest

from nvflare_torchrun_plugin.job import script_imports
from nvflare_torchrun_plugin.job.script_imports import NVFLARE, SHARDED


def ahead_of(folder: Path, **files: str) -> tuple[str, ...]:
    """Return what is read of ``script.py`` beside the other files."""
    for name, text in files.items():
        path = folder / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return script_imports.ahead_of(str(folder / "script.py"), module=False, folders=[str(folder / "lib")])


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("", ("torch",)),
        ("import os, json as j\nimport xml.etree", ("os", "json", "xml.etree", "torch")),
        ("from json import loads, dumps as d", ("json:loads", "json:dumps", "torch")),
        ("from json import *", ("json", "torch")),
        ("from . import a\nfrom .b import c\nfrom __future__ import annotations", ("torch",)),
        ("import json\nimport json\nfrom torch import nn", ("json", "torch:nn")),
        ("import nvflare.client as flare\nimport torch", ("nvflare.client", "torch", NVFLARE)),
        (
            "from nvflare_torchrun_plugin import client",
            ("nvflare_torchrun_plugin:client", "torch", SHARDED, NVFLARE),
        ),
        # Functions are not run by then, and not all branches are.
        ("def f():\n    import json\nif True:\n    import random\nimport os", ("os", "torch")),
        ("'a text'\nimport os\nprint(os)\nimport json", ("os", "json", "torch")),
        # Whatever is imported after it may have read the variable.
        ("import os\nos.environ['A'] = '1'\nimport torch", ("os",)),
        ("import os, nvflare\nos.putenv('A', '1')\nimport torch", ("os", "nvflare")),
        ("from os import environ\nif environ:\n    pass\nimport torch", ("os:environ",)),
        ("import os\ndef f():\n    os.environ['A'] = '1'\nimport json", ("os", "json", "torch")),
        ("import os\ndef f():\n    g()\ndef g():\n    os.environ['A'] = '1'\nf()\nimport json", ("os",)),
        ("import os\nA = os.environ.get('A', os.environ['B'])\nimport json", ("os", "json", "torch")),
        ("import os\nos.environ.get('A')\ndel os.environ['A']\nimport json", ("os",)),
        ("import os\nclass C:\n    os.environ['A'] = '1'\nimport json", ("os",)),
        ("from os import environ as e\ne['A'] = '1'\nimport json", ("os:environ",)),
        ("import dotenv\ndotenv.load_dotenv()\nimport json", ("dotenv",)),
        # A module of the same name may be found elsewhere after it.
        ("import sys\nsys.path.insert(0, '/a')\nimport json", ("sys",)),
        ("import sys\nsys.path[:0] = ['/a']\nimport json", ("sys",)),
        ("import sys\nsys.path = ['/a', *sys.path]\nimport json", ("sys",)),
        ("import sys\nsys.path.append('/a')\nsys.path += ['/b']\nimport json", ("sys", "json", "torch")),
        ("import sys\nif '/a' not in sys.path:\n    sys.path.append('/a')\nimport json", ("sys", "json", "torch")),
        # What is imported after it would be another module, or make other tensors.
        ("import sys\nsys.modules['xml'] = None\nimport json", ("sys", "torch")),
        ("from sys import modules as m\nm.pop('xml', None)\nimport json", ("sys:modules", "torch")),
        ("import sys\nsys.meta_path.insert(0, 1)\nimport json", ("sys", "torch")),
        ("import sys\nprint('xml' in sys.modules, sys.modules['os'])\nimport json", ("sys", "json", "torch")),
        ("import torch\ntorch.set_default_dtype(torch.float64)\nimport json", ("torch",)),
        ("import torch\ndef f():\n    torch.set_default_device('meta')\nf()\nimport json", ("torch",)),
        (
            "import torch, nvflare.client\ntorch.set_default_dtype(torch.float64)",
            ("torch", "nvflare.client", NVFLARE),
        ),
        ("this is no Python", ("torch",)),
        ("\0", ("torch",)),
    ],
)
def test_names_at_the_top_of_a_script(tmp_path: Path, text: str, names: tuple[str, ...]) -> None:
    assert ahead_of(tmp_path, script=text) == names


def test_of_the_job_s_own_modules_it_is_what_they_import(tmp_path: Path) -> None:
    files = {
        "script": "import own\nfrom package import inner, value\nimport lib_module\nimport csv",
        "own": "import json, script",
        "package/__init__": "import random\nvalue = 1",
        "package/inner": "import decimal",
        "lib/lib_module": "import fractions",
    }
    assert ahead_of(tmp_path, **files) == ("json", "random", "decimal", "fractions", "csv", "torch")


def test_what_a_module_of_the_job_sets_counts_for_what_comes_after_it(tmp_path: Path) -> None:
    files = {
        "script": "import csv\nimport own\nimport torch",
        "own": "import os\nos.environ['A'] = '1'\nimport json",
    }
    assert ahead_of(tmp_path, **files) == ("csv", "os")


def test_what_a_package_sets_counts_for_its_modules(tmp_path: Path) -> None:
    files = {
        "script": "from package.inner import value\nimport torch",
        "package/__init__": "import os\nfrom . import settings",
        "package/settings": "os.environ['A'] = '1'",
        "package/inner": "import json",
        "package/run": "from .deeper import other\nimport json",
        "package/deeper/__init__": "from .. import settings",
    }
    assert ahead_of(tmp_path, **files) == ("os",)
    assert script_imports.ahead_of("package.run", module=True, folders=[str(tmp_path)]) == ("os",)
    (tmp_path / "package" / "__init__.py").write_text("")
    assert script_imports.ahead_of("package.run", module=True, folders=[str(tmp_path)]) == ()
    (tmp_path / "package" / "settings.py").write_text("from ... import too_high")
    assert script_imports.ahead_of("package.run", module=True, folders=[str(tmp_path)]) == ("json", "torch")


def test_what_a_module_does_only_as_the_script_counts_there_alone(tmp_path: Path) -> None:
    guarded = "import os\nif __name__ == '__main__':\n    os.environ['A'] = '1'\nimport json"
    assert ahead_of(tmp_path, script="import own", own=guarded) == ("os", "json", "torch")
    assert ahead_of(tmp_path, script=guarded) == ("os",)


def test_a_module_is_found_without_importing_its_packages(tmp_path: Path) -> None:
    (tmp_path / "package" / "inner").mkdir(parents=True)
    (tmp_path / "package" / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "package" / "inner" / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "package" / "inner" / "__main__.py").write_text("import csv")
    (tmp_path / "package" / "run.py").write_text("import json")
    found = {
        name: script_imports.ahead_of(name, module=True, folders=[str(tmp_path)])
        for name in ("package.run", "package.inner", "package", "no.such", "csv.x")
    }
    assert found == {
        "package.run": ("json", "torch"),
        "package.inner": ("csv", "torch"),
        "package": ("torch",),
        "no.such": ("torch",),
        "csv.x": ("torch",),
    }
