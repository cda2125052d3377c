"""The Client API bootstrap for nodes other than the CJ's."""

from __future__ import annotations

import json

import pytest
from nvflare.client.cell.bootstrap import (
    BOOTSTRAP_FILE_ENV_VAR,
    BOOTSTRAP_SCHEMA_VERSION,
    CELL_API_TYPE,
    EXTERNAL_PROCESS_EXECUTION_MODE,
    BootstrapKey,
    get_bootstrap_client_api_type,
)

from nvflare_torchrun_plugin.node import bootstrap

CONFIG = {
    BootstrapKey.SCHEMA_VERSION: BOOTSTRAP_SCHEMA_VERSION,
    BootstrapKey.EXECUTION_MODE: EXTERNAL_PROCESS_EXECUTION_MODE,
    BootstrapKey.CONNECT_URL: "tcp://127.0.0.1:4711",
    BootstrapKey.CJ_FQCN: "site-1.job",
    BootstrapKey.CJ_PID: 4711,
    BootstrapKey.TRAINER_FQCN: "site-1.job.trainer",
    BootstrapKey.LAUNCH_TOKEN: "s3cr3t-token",
    BootstrapKey.JOB_ID: "job",
    BootstrapKey.SITE_NAME: "zürich",
}


def test_names_are_those_of_nvflare() -> None:
    assert bootstrap.FILE_VARIABLE == BOOTSTRAP_FILE_ENV_VAR


def test_the_secret_and_the_process_id_stay_home() -> None:
    text = bootstrap.without_secret(json.dumps(CONFIG))
    assert "s3cr3t-token" not in text
    data = json.loads(text)
    changed = {BootstrapKey.LAUNCH_TOKEN, BootstrapKey.CJ_PID}
    assert BootstrapKey.CJ_PID not in data
    assert {key: value for key, value in data.items() if key not in changed} == {
        key: value for key, value in CONFIG.items() if key not in changed
    }


def test_nvflare_accepts_what_is_left() -> None:
    data = json.loads(bootstrap.without_secret(json.dumps(CONFIG)))
    assert get_bootstrap_client_api_type(data) == CELL_API_TYPE


def test_a_missing_token_is_not_made_up() -> None:
    assert json.loads(bootstrap.without_secret('{"site_name": "a"}')) == {"site_name": "a"}


@pytest.mark.parametrize("text", ["", "[]", "null", "{", '"launch_token"'])
def test_what_is_no_bootstrap_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"JSON object|Expecting|Expected"):
        bootstrap.without_secret(text)
