"""The commands of the workflows in .github, run here, because the workflows run rarely and could break unnoticed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import fa2_lab

PROJECT = Path(__file__).resolve().parents[2]
VERSION = fa2_lab.__version__
RUN_ELSEWHERE = (  # commands that install, or that .ci/run and other tests run: test_package, test_site, test_colab
    "pip install ",
    "bash .ci/run",
    "python -m pytest\n",
    "python -m build\n",
    "python -m fa2_lab book --html ",
    "python -m fa2_lab book --colab ",
)


def steps(workflow: str, job: str) -> list[str]:
    """Return the commands of a workflow's job."""
    read = yaml.safe_load((PROJECT / ".github" / "workflows" / f"{workflow}.yml").read_text(encoding="utf-8"))
    return [step["run"].strip() + "\n" for step in read["jobs"][job]["steps"] if "run" in step]


def untested_commands(workflow: str, job: str) -> list[str]:
    """Return the commands of a workflow's job that no other test runs."""
    return [command for command in steps(workflow, job) if not command.startswith(RUN_ELSEWHERE)]


def run_step(command: str, folder: Path = PROJECT, **variables: str) -> subprocess.CompletedProcess:
    """Run a step as a workflow does, with this Python."""
    path = os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"]))
    environment = os.environ | dict(PATH=path) | variables
    call = ["bash", "-e", "-o", "pipefail", "-c", command]
    return subprocess.run(call, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def hook_commands() -> list[str]:
    """Return the commands of pre-commit, changed so that they check all files and change none."""
    config = yaml.safe_load((PROJECT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    entries = [hook["entry"] for hook in config["repos"][0]["hooks"]]
    return [entry.replace("ruff format", "ruff format --check") + " ." * entry.startswith("ruff") for entry in entries]


@pytest.mark.parametrize("hook", hook_commands())
def test_workflow_style_job_passes(hook):
    assert untested_commands("ci", "style") == ["pre-commit run --all-files\n"]
    if not shutil.which(hook.split()[0], path=str(Path(sys.executable).parent)):
        pytest.skip(f"{hook.split()[0]} is not installed here")
    result = run_step(hook)
    assert result.returncode == 0, result.stdout + result.stderr


def test_workflow_newest_versions_job_passes():
    assert untested_commands("ci", "newest") == ["python -m fa2_lab doctor\n"]  # whose status test_doctor.py looks at
    assert untested_commands("ci", "readme") == []


def test_workflow_numpy_only_job_passes(tmp_path):
    hidden = "import sys\nsys.modules.update(dict.fromkeys(('torch', 'triton', 'matplotlib', 'transformers')))\n"
    (tmp_path / "sitecustomize.py").write_text(hidden)
    path = os.pathsep.join((str(tmp_path), str(PROJECT)))
    results = [run_step(command, PYTHONPATH=path) for command in untested_commands("ci", "numpy")]
    assert [job.returncode for job in results] == [0, 0, 0], [job.stdout + job.stderr for job in results]
    assert "skipped: torch is not installed" in results[0].stdout


def test_workflow_release_job_passes(tmp_path):
    rewrite_links, version = untested_commands("release", "build")
    assert untested_commands("release", "publish") == []
    address = "https://github.com/someone/fa2_lab/blob/abc/"
    source = (
        '[a](API.md#calls) [b](https://x.y) [c](#d)\n![e](figures/e.svg) <source srcset="figures/f.svg"><img src="g">\n'
    )
    (tmp_path / "README.md").write_text(source)
    result = run_step(rewrite_links, tmp_path, GITHUB_REPOSITORY="someone/fa2_lab", GITHUB_SHA="abc")
    raw = "https://raw.githubusercontent.com/someone/fa2_lab/abc/figures/"
    want = source.replace("API.md", f"{address}API.md").replace("figures/", raw)
    assert result.returncode == 0 and (tmp_path / "README.md").read_text() == want, result.stderr
    shutil.copy(PROJECT / "README.md", tmp_path)  # on PyPI, no picture of it may have a relative address
    assert run_step(rewrite_links, tmp_path, GITHUB_REPOSITORY="a/b", GITHUB_SHA="c").returncode == 0
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert not any(f"{opening}figures/" in text for opening in ('src="', 'srcset="', "](", ", "))

    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / f"fa2_lab-{VERSION}-py3-none-any.whl").touch()
    user = "-c user.name=a -c user.email=a@b"
    for message, tag, status in (
        (f"Version {VERSION}", VERSION, 0),
        (f"Version {VERSION}", "9.9", 2),
        ("x", VERSION, 1),
    ):
        setup = run_step(f"git init -q . && git {user} commit -q --allow-empty -m '{message}'", tmp_path)
        assert setup.returncode == 0, setup.stderr
        assert run_step(version, tmp_path, GITHUB_REF_NAME=f"v{tag}").returncode == status


def test_workflow_pages_job_writes_the_address_into_readme_once(tmp_path):
    (address,) = untested_commands("pages", "site")
    checkout, site = tmp_path / "checkout", "https://someone.github.io/fa2_lab/"
    setup = run_step(f"git init -q --bare hub && git clone -q hub {checkout}", tmp_path)
    shutil.copy(PROJECT / "README.md", checkout)
    user = "-c user.name=a -c user.email=a@b"
    setup = run_step(f"git add . && git {user} commit -qm one && git push -q -u origin HEAD", checkout)
    assert setup.returncode == 0, setup.stderr
    for _ in range(2):  # the second time nothing is left to write
        result = run_step(address, checkout, SITE=site)
        assert result.returncode == 0, result.stderr
    assert run_step("git log --all --format=%s", tmp_path / "hub").stdout.count("README: ") == 1
    before, after = (folder.joinpath("README.md").read_text(encoding="utf-8") for folder in (PROJECT, checkout))
    assert f'<a href="{site}figures/live/algorithm1.html"><picture>' in after
    assert f"[The site]({site}) has" in after and len(after.splitlines()) == len(before.splitlines())
