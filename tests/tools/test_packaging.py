"""What a release is made of: the wheel and the sdist hold the package, and CI runs the versions of Python they name."""

import configparser
import email
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml

from sparse_attn.version import __version__

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
INFO = f"sparse_attn-{__version__}.dist-info"


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The folder of an sdist of this repository and of the wheel made of that, as ``python -m build`` makes them."""
    folder = tmp_path_factory.mktemp("built")
    for name in ("setup.py", "setup.cfg", "README.md", "CHANGELOG.md", "LICENSE"):
        shutil.copy(ROOT / name, folder)
    for name in ("sparse_attn", "scripts", "tests"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__", ".*", "site"))

    def build(what, source):
        code = f"from setuptools.build_meta import __legacy__; __legacy__.build_{what}({str(folder)!r})"
        done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True)
        assert not done.returncode, done.stderr

    build("sdist", folder)
    with tarfile.open(folder / f"sparse_attn-{__version__}.tar.gz") as sdist:
        sdist.extractall(folder, filter="data")
    build("wheel", folder / f"sparse_attn-{__version__}")
    return folder


@pytest.fixture(scope="module")
def wheel(built):
    return built / f"sparse_attn-{__version__}-py3-none-any.whl"


def test_a_wheel_holds_the_package_and_nothing_else(wheel):
    files = (it for it in (ROOT / "sparse_attn").rglob("*") if it.is_file() and "__pycache__" not in it.parts)
    package = {str(it.relative_to(ROOT)) for it in files if it.suffix != ".md"}  # pages are for the repository
    about = ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "top_level.txt", "licenses/LICENSE")
    about = {f"{INFO}/{name}" for name in (*about, "licenses/sparse_attn/data/NOTICE")}
    assert {"sparse_attn/py.typed", "sparse_attn/data/NOTICE", "sparse_attn/data/reader_v4/config.json"} <= package
    assert set(zipfile.ZipFile(wheel).namelist()) == package | about
    assert wheel.stat().st_size < 16e6


def test_an_sdist_holds_what_a_wheel_is_made_of(built):
    with tarfile.open(built / f"sparse_attn-{__version__}.tar.gz") as sdist:
        top = {name.split("/")[1] for name in sdist.getnames() if "/" in name}
    assert top == {"LICENSE", "PKG-INFO", "README.md", "setup.cfg", "setup.py", "sparse_attn", "sparse_attn.egg-info"}


def test_a_wheel_says_what_it_is_and_needs(wheel):
    about = email.message_from_bytes(zipfile.ZipFile(wheel).read(f"{INFO}/METADATA"))
    assert (about["Name"], about["Version"], about["License-Expression"]) == ("sparse_attn", __version__, "Apache-2.0")
    needed = {it for it in about.get_all("Requires-Dist") if "extra ==" not in it}
    assert needed == {"torch>=2.11", 'triton>=3.6; platform_system == "Linux"'}


def test_a_wheel_runs_outside_the_repository(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}

    def run(*command):
        command = [sys.executable, *command]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert not done.returncode, done.stderr
        return done.stdout

    assert run("-c", "import sparse_attn; print(sparse_attn.__file__)").startswith(str(tmp_path))
    assert run("-m", "sparse_attn", "generate", "--max-new-tokens", "16").startswith("0591]")  # what the text recorded
    assert "hopper" in run("-m", "sparse_attn", "explain", "attention_decode", "--target", "sm_90")


def test_ci_runs_the_versions_of_python_that_are_declared():
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    declared = re.findall(r"Python :: (3\.\d+)", config["metadata"]["classifiers"])
    tests = yaml.safe_load((ROOT / ".github" / "workflows" / "tests.yml").read_text())
    assert tests["jobs"]["tests"]["strategy"]["matrix"]["python"] == declared
    assert config["options"]["python_requires"] == f">={declared[0]}"


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_a_workflow_may_do_little_and_pins_what_it_uses(path):
    workflow = yaml.safe_load(path.read_text())
    assert workflow["permissions"] == {"contents": "read"} and workflow["concurrency"]["group"]
    for name, job in workflow["jobs"].items():
        assert job["timeout-minutes"], name
        for step in job["steps"]:
            assert re.fullmatch(r"[\w-]+/[\w-]+@(release/)?v\d+", step.get("uses", "a/b@v1"))
            assert (
                "id-token" not in job.get("permissions", {}) or "run" not in step
            )  # what may publish runs no code of ours
