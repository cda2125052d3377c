"""Which lines of NVFlare's logs count as errors of a job."""

import json
from pathlib import Path

import job_log


def test_only_what_nvflare_says_of_itself_is_no_error_of_the_job(tmp_path: Path) -> None:
    monitor = "nvflare.fuel.f3.sfm.heartbeat_monitor"
    race = "Heartbeat check failed: dictionary changed size during iteration"
    logged = [
        (monitor, "ERROR", race),
        (monitor, "ERROR", "Heartbeat check failed: 'NoneType' object has no attribute 'conn'"),
        ("train", "ERROR", race),
        (monitor, "INFO", "all is well"),
    ]
    log = tmp_path / "log.json"
    log.write_text(
        "".join(json.dumps(dict(zip(("fullName", "levelname", "message"), e, strict=True))) + "\n" for e in logged)
    )

    assert job_log.errors(job_log.entries(log)) == [logged[1][2], race]
