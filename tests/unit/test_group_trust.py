"""What a job without the bring-your-own-code right may do, and what its user is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from nvflare_torchrun_plugin.description.group_choice import Wish, check_trust, choose
from nvflare_torchrun_plugin.description.group_description import parse
from nvflare_torchrun_plugin.description.site_file import SiteFile
from nvflare_torchrun_plugin.group_values import NodeGroupError

SITE_PATH = "/ws/local/node_group.yaml"


def site(nodes: object, *scripts: str) -> SiteFile:
    group = parse({"nodes": nodes, "env": {"FROM": "site"}}, f"site file {SITE_PATH}", {}) if nodes else None
    return SiteFile(group, scripts, SITE_PATH)


class TestTrust:
    @staticmethod
    def check(site_file: SiteFile | None, byoc: bool = False, **asked: Any) -> None:
        names = ("job_env", "job_options", "job_preload", "job_group")
        check_trust(byoc, site_file, **{"script": None, "module": None, **dict.fromkeys(names, False), **asked})

    def test_with_the_right_all_goes(self) -> None:
        self.check(None, byoc=True, module="m", job_env=True, job_options=True, job_preload=True, job_group=True)
        self.check(None, byoc=True, script="relative.py")

    def test_without_it_a_listed_script_goes(self, tmp_path: Path) -> None:
        real = tmp_path / "real.py"
        real.touch()
        link = tmp_path / "link.py"
        link.symlink_to(real)
        self.check(site(2, "/other.py", str(real)), script=str(real))
        self.check(site(2, str(real)), script=str(link))
        self.check(site(2, str(link)), script=f"{tmp_path}/x/../real.py")

    def test_a_link_beside_a_listed_script_does_not(self, tmp_path: Path) -> None:
        (tmp_path / "evil.py").touch()
        (tmp_path / "link.py").symlink_to(tmp_path / "evil.py")
        with pytest.raises(NodeGroupError, match="may not run the script"):
            self.check(site(None, str(tmp_path / "good.py")), script=str(tmp_path / "link.py"))

    def test_a_relative_path_does_not(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)
        with pytest.raises(NodeGroupError, match=r"may not run the script good\.py"):
            self.check(site(None, str(tmp_path / "good.py")), script="good.py")

    @pytest.mark.parametrize("script", [None, "", "/x\0", "/\ud800", "/"])
    def test_what_is_no_listed_path_does_not(self, script: str | None) -> None:
        with pytest.raises(NodeGroupError, match="may not run the script"):
            self.check(site(None, "/x"), script=script)

    def test_the_user_learns_the_rule_and_both_ways_out(self) -> None:
        with pytest.raises(NodeGroupError) as caught:
            self.check(site(2, "/good.py"), script="/evil.py")
        assert str(caught.value) == (
            "a job without the BYOC right (bring your own code) may not run the script /evil.py at this site:"
            " submit it with a custom folder, as a user who has the right, or ask the site's admin to add the"
            f" script to allowed_scripts in {SITE_PATH}"
        )

    def test_a_site_without_the_file_allows_nothing(self) -> None:
        with pytest.raises(NodeGroupError, match=r"allowed_scripts in local/node_group\.yaml of its workspace$"):
            self.check(None, script="/good.py")

    @pytest.mark.parametrize(
        ("asked", "message"),
        [
            (
                {"script": None, "module": "os"},
                r"may not run a module \('os'\) .* add a script for it to allowed_",
            ),
            ({"module": "os"}, r"may not run a module \('os'\)"),
            (
                {"job_options": True},
                r"may not give options of torchrun \(torchrun_args\) .* in the script itself$",
            ),
            (
                {"job_preload": True},
                r"may not name modules to import ahead \(preload of warm_start\) .* let the script import them$",
            ),
            ({"job_env": True}, rf"may not set environment variables \(env\) .* env in {SITE_PATH}$"),
            ({"job_group": True}, rf"may not describe a node group \(node_group\) .* nodes in {SITE_PATH}$"),
        ],
    )
    def test_nothing_else_goes(self, asked: dict[str, Any], message: str) -> None:
        with pytest.raises(NodeGroupError, match=message):
            self.check(site(2, "/good.py"), **{"script": "/good.py", **asked})

    @pytest.mark.parametrize("code", ["torch/__init__.py", "config/deep/nvflare.abi3.so", "sitecustomize.pyc"])
    def test_code_beside_the_custom_folder_does_not(self, tmp_path: Path, code: str) -> None:
        """torchrun would import it: the app's directory is its working directory."""
        (tmp_path / "config").mkdir()
        (tmp_path / "config" / "config_fed_client.json").write_text("{}")
        self.check(site(2, "/good.py"), script="/good.py", app_dir=str(tmp_path))
        (tmp_path / code).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / code).touch()
        with pytest.raises(NodeGroupError, match=rf"may not have Python code \('{code}'\) at this site"):
            self.check(site(2, "/good.py"), script="/good.py", app_dir=str(tmp_path))
        with pytest.raises(NodeGroupError, match="may not have Python code"):
            choose(
                {},
                site(2, "/good.py"),
                None,
                Wish(),
                byoc=False,
                launch_once=False,
                script="/good.py",
                app_dir=str(tmp_path),
            )

    def test_choosing_a_group_checks_it_first(self) -> None:
        site_file = site(2, "/good.py")
        wish = Wish()
        ok = choose({}, site_file, None, wish, byoc=False, launch_once=False, script="/good.py")
        assert ok.nnodes == 2
        for asked in ({"script": "/evil.py"}, {"module": "os"}, {"script": "/good.py", "job_env": True}):
            with pytest.raises(NodeGroupError, match="a job without the BYOC right"):
                choose({}, site_file, None, wish, byoc=False, launch_once=False, **asked)
        with pytest.raises(NodeGroupError, match="may not describe a node group"):
            choose({}, site_file, {"nodes": 1}, wish, byoc=False, launch_once=False, script="/good.py")
