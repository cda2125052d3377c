"""Where the bundled NVFlare job templates are.

``python -m nvflare_torchrun_plugin.templates`` prints the folder, for use on a command line::

    nvflare job create -w "$(python -m nvflare_torchrun_plugin.templates)/torchrun_fedavg_pt" ...
"""

from pathlib import Path

__all__ = ["path"]

_FOLDER = "job_templates"


def path() -> Path:
    """The folder that holds one sub-folder per job template.

    A wheel carries it inside the package; an editable install uses the checkout's, beside the package.

    Returns:
        an absolute path to an existing folder.

    Raises:
        FileNotFoundError: neither place has it, so the installation is incomplete.
    """
    package = Path(__file__).resolve().parent
    places = (package / _FOLDER, package.parent / _FOLDER)
    for place in places:
        if place.is_dir():
            return place
    raise FileNotFoundError(
        f"no job templates at {places[0]} or {places[1]}: the package is not whole, install it again"
    )


if __name__ == "__main__":
    print(path())
